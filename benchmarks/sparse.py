"""What sparsity costs and saves: FedSparse's and FedDrop's local updates against FedAvg's, smaller models' speed.

Ratios are medians of interleaved repetitions in one run. `python -m benchmarks.sparse`; run it with nothing else going.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import laconic as lc
from benchmarks.rounds import Bar
from laconic.core import ClientInfo, Key, Method, Tree
from laconic.experiment import make_task
from laconic.models import find_groups, lenet5_fs, multiply_adds, plan, sliced

SOLVER = lc.Solver(lr=0.05, local_epochs=1, batch_size=64)
EXAMPLES = 512  # of one client: eight steps, as in the CIFAR-10 runs


def federation(shape: tuple[int, int, int] = (3, 32, 32)) -> lc.Federation:
    """CIFAR-sized random images: time does not depend on what they show."""
    rng = np.random.default_rng(0)
    x, y = rng.random((2 * EXAMPLES, *shape), dtype=np.float32), rng.integers(0, 10, 2 * EXAMPLES)
    return lc.Federation.from_arrays((x, y), (x[:10], y[:10]), clients=2)


def update(method: Method, data: lc.Federation, model: str = "lenet5_fs", **settings: Any) -> Callable[[int], None]:
    """A client's local update: unpack, train, pack."""
    bound = method.bind(make_task(data, model, settings))
    server, key = bound.init(Key.from_seed(0)), Key.from_seed(1)
    client = ClientInfo(0, 1, EXAMPLES)
    replica = bound.replica
    received: Tree = bound.broadcast(server, client, key) if replica is None else replica.first(server)
    personal = bound.init_client(key)

    def run(number: int) -> None:
        bound.client_update(received, personal, data.client(0), client, key.fold_in(number))

    return run


def interleaved(updates: dict[str, Callable[[int], Any]], repetitions: int) -> dict[str, float]:
    """Median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(repetitions + 1):
        for name, run in updates.items():
            began = time.perf_counter()
            run(number)
            if number:  # the first is for warming up
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def exported(sparsity: float) -> tuple[torch.nn.Module, torch.nn.Module, float]:
    """LeNet5-FS and the same without some of its filters and neurons, as many of each layer as `sparsity` needs."""
    whole = lenet5_fs((3, 32, 32), 10).eval()
    groups = find_groups(whole)
    assert groups.anatomy is not None
    for share in np.linspace(0.3, 0.9, 121):
        opened = torch.ones(groups.count, dtype=torch.bool)
        for layer in groups.layers:
            opened[layer.first : layer.first + int(share * layer.count)] = False
        removed = sum(int((~p.present(opened)).sum()) * p.size for p in groups.pieces.values())
        reached = removed / sum(p.numel() for p in whole.parameters())
        if reached >= sparsity:
            small = sliced(whole, groups.anatomy, plan(groups.anatomy, groups.open_units(opened))).eval()
            return whole, small, reached
    raise RuntimeError("no share of units reaches this sparsity")


def main(repetitions: int = 15) -> None:
    """Measure, print, and exit with 1 where a bar is missed."""
    torch.set_num_threads(1)
    data = federation()
    adam = lc.ServerOptimizer("adam", lr=1e-3)
    updates = {
        "fedavg": update(lc.fedavg(solver=SOLVER), data),
        "fedsparse": update(lc.fedsparse(solver=SOLVER, server=adam), data),
        "feddrop": update(lc.feddrop(conv_rate=0.1, fc_rate=0.5, solver=SOLVER, server=adam), data),
        "feddrop, fc only": update(lc.feddrop(conv_rate=0.0, first_rate=0.0, fc_rate=0.5, solver=SOLVER), data),
    }
    seconds = interleaved(updates, repetitions)
    base = seconds["fedavg"]
    detail = f"a turn of 8 steps takes FedAvg {base:.3f} s"
    bars = [
        Bar("FedSparse / FedAvg client turn", seconds["fedsparse"] / base, 1.35, detail),
        Bar("FedDrop (conv .1, fc .5) / FedAvg client turn", seconds["feddrop"] / base, 1.0, detail),
        Bar("FedDrop (fc .5 only) / FedAvg client turn", seconds["feddrop, fc only"] / base, 1.0, detail),
    ]
    whole, small, sparsity = exported(0.6)
    x = torch.from_numpy(np.random.default_rng(1).random((64, 3, 32, 32), dtype=np.float32))
    with torch.no_grad():
        speeds = interleaved({"whole": lambda _: whole(x), "small": lambda _: small(x)}, 5 * repetitions)
    saved = multiply_adds(small, (3, 32, 32)) / multiply_adds(whole, (3, 32, 32))
    bars.append(
        Bar(
            f"model without {100 * sparsity:.0f} % of its weights / whole model, prediction",
            speeds["small"] / speeds["whole"],
            1 / 1.5,
            f"{speeds['whole'] / speeds['small']:.2f} times as fast, {100 * saved:.0f} % of the multiply-adds",
        )
    )
    for bar in bars:
        print(bar.line())
    sys.exit(not all(bar.met for bar in bars))


if __name__ == "__main__":
    main()
