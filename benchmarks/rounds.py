"""Round time against a bare PyTorch loop, against the number of registered clients, memory, and start-up.

Ratios are medians of interleaved repetitions in one run. `python -m benchmarks.rounds`; run it with nothing else going.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import laconic as lc
from benchmarks.bare import BareLoop
from laconic.engine import Schedule, Simulation, sample_cohort
from laconic.experiment import make_task, prepare
from laconic.models import lenet5_fs, mlp


@dataclass(frozen=True)
class Bar:
    """A measured ratio and the most that it may be."""

    name: str
    value: float
    limit: float
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.limit

    def line(self) -> str:
        return f"{'PASS' if self.met else 'FAIL'}  {self.name}: {self.value:.3f} (at most {self.limit})  {self.detail}"


def images(clients: int, per_client: int = 600) -> lc.Federation:
    """MNIST-sized random images: time does not depend on what they show."""
    rng = np.random.default_rng(0)
    n = min(clients * per_client, 60_000)
    x = rng.random((n, 1, 28, 28), dtype=np.float32)
    y = rng.integers(0, 10, n)
    return lc.Federation.from_arrays((x, y), (x[:100], y[:100]), clients=clients)


def laconic_rounds(
    federation: lc.Federation, model: Callable[[], nn.Module], *, up: str = "float32", **solver: Any
) -> Iterator[dict[str, Any]]:
    return iter(simulation(federation, model, up=up, **solver))


def simulation(
    federation: lc.Federation, model: Callable[[], nn.Module], *, up: str = "float32", **solver: Any
) -> Simulation:
    schedule = Schedule(rounds=100_000, cohort=10, eval_every=100_000, local_eval=False, workers=2)
    method = lc.fedavg(solver=lc.Solver(local_epochs=1, **solver))
    task = make_task(federation, model)
    return prepare(method=method, task=task, federation=federation, schedule=schedule, seed=0, up=up)


def against_bare_loop(
    name: str, build: Callable[[], nn.Module], *, lr: float, batch_size: int, repetitions: int
) -> Bar:
    federation = images(100)
    mine = simulation(federation, build, lr=lr, batch_size=batch_size)
    agreement = mine.agreement
    first = [leaf.clone() for leaf in mine.state.server.values()]
    ours = iter(mine)
    bare = BareLoop(build, federation, agreement, first, lr=lr, batch_size=batch_size)
    number = {"ours": 0, "bare": 0}

    def round_of(which: str) -> None:
        number[which] += 1
        if which == "ours":
            next(ours)
        else:
            bare.round(number[which], sample_cohort(agreement.round_key(number[which]), clients=100, cohort=10))

    for which in ("ours", "bare"):
        round_of(which)
    for weight, leaf in zip(bare.weights, mine.state.server.values(), strict=True):
        torch.testing.assert_close(weight, leaf, rtol=1e-3, atol=1e-5)  # they do the same steps
    ratios, seconds = [], []
    for repetition in range(repetitions):
        took = {"bare": 0.0, "ours": 0.0}
        for which in ("bare", "ours") if repetition % 2 else ("ours", "bare"):
            began = time.perf_counter()
            for _ in range(3):
                round_of(which)
            took[which] = time.perf_counter() - began
        ratios.append(took["ours"] / took["bare"])
        seconds.append((took["ours"] / 3, took["bare"] / 3))
    bare.close()
    ours.close()  # type: ignore[attr-defined]
    my_seconds, theirs = (statistics.median(s[i] for s in seconds) for i in (0, 1))
    return Bar(
        f"{name}, round time / bare loop", statistics.median(ratios), 1.10, f"{my_seconds:.3f} s / {theirs:.3f} s"
    )


def interleaved(
    name: str, runs: dict[str, Iterator[dict[str, Any]]], *, limit: float, rounds: int, repetitions: int
) -> Bar:
    """The second run's time over the first one's, measured in turns."""
    first, second = runs
    for run in runs.values():
        next(run)
    ratios, seconds = [], {first: [], second: []}  # type: ignore[var-annotated]
    for repetition in range(repetitions):
        took = {}
        for which in (first, second) if repetition % 2 else (second, first):
            began = time.perf_counter()
            for _ in range(rounds):
                next(runs[which])
            took[which] = time.perf_counter() - began
            seconds[which].append(took[which] / rounds)
        ratios.append(took[second] / took[first])
    for run in runs.values():
        run.close()  # type: ignore[attr-defined]
    detail = f"{statistics.median(seconds[second]):.3f} s / {statistics.median(seconds[first]):.3f} s"
    return Bar(name, statistics.median(ratios), limit, detail)


def against_float32(codec: str, repetitions: int) -> Bar:
    federation, build = images(100), partial(lenet5_fs, (1, 28, 28), 10)
    runs = {up: laconic_rounds(federation, build, up=up, lr=0.05, batch_size=20) for up in ("float32", codec)}
    return interleaved(
        f"LeNet5-FS, round time, {codec} / float32 up", runs, limit=1.15, rounds=2, repetitions=repetitions
    )


def against_registered_clients(repetitions: int) -> Bar:
    """Real federations of clients with 20 small examples each: what is left is the engine's own work."""
    runs = {}
    for clients in (100, 100_000):
        rng = np.random.default_rng(0)
        x, y = rng.random((20 * clients, 16), dtype=np.float32), rng.integers(0, 10, 20 * clients)
        federation = lc.Federation.from_arrays((x, y), (x[:100], y[:100]), clients=clients)
        runs[str(clients)] = laconic_rounds(federation, partial(mlp, (16,), 10, hidden=(64,)), lr=0.1, batch_size=1)
    name = "round time, 100,000 / 100 registered clients"
    return interleaved(name, runs, limit=1.15, rounds=10, repetitions=repetitions)


_MEMORY = """
import resource, sys
from functools import partial
import numpy as np
import laconic as lc
from laconic.engine import Schedule
from laconic.experiment import make_task, prepare
from laconic.models import mlp
rng = np.random.default_rng(0)
x, y = rng.random((8000, 784), dtype=np.float32), rng.integers(0, 10, 8000)
federation = lc.Federation.from_arrays((x, y), (x[:100], y[:100]), clients=2000)
schedule = Schedule(rounds=2, cohort=int(sys.argv[1]), eval_every=2, local_eval=False, workers=2)
method = lc.fedavg(solver=lc.Solver(local_epochs=1, batch_size=4, lr=0.1))
task = make_task(federation, partial(mlp, (784,), 10, hidden=(1000,)))
def peak():  # of this image alone: ru_maxrss remembers what the process was before exec
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
for _ in prepare(method=method, task=task, federation=federation, schedule=schedule, seed=0):
    pass
print(before, peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def memory() -> Bar:
    """Peaks of the parent and of its largest worker, imports and data included, which are the same for both cohorts."""
    said = {}
    for cohort in (10, 1000):
        command = [sys.executable, "-c", _MEMORY, str(cohort)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        said[cohort] = [int(word) / 1024 for word in output.split()]
    (before, few, worker_few), (_, many, worker_many) = said[10], said[1000]
    parent = f"parent {many:.0f} / {few:.0f} MiB ({before:.0f} before the first round)"
    detail = f"{parent}, worker {worker_many:.0f} / {worker_few:.0f} MiB"
    return Bar("peak memory, cohort 1,000 / cohort 10", max(many / few, worker_many / worker_few), 1.2, detail)


_START = """
import time
began = time.time()
import laconic as lc
from laconic.engine import Schedule
from laconic.experiment import make_task, prepare
data = lc.data.digits(clients=50)
run = iter(prepare(method=lc.fedavg(), task=make_task(data, "mlp"), federation=data, schedule=Schedule(), seed=0))
next(run)
print(time.time() - began)
"""


def start_up(repetitions: int) -> Bar:
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", _START], capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    return Bar("start-up to the first round, seconds", statistics.median(seconds), 6.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n = arguments.repetitions
    bars = []
    for measure in (
        lambda: against_bare_loop(
            "MLP 784-200-10, B=10", partial(mlp, (1, 28, 28), 10, hidden=(200,)), lr=0.1, batch_size=10, repetitions=n
        ),
        lambda: against_bare_loop(
            "LeNet5-FS, B=20", partial(lenet5_fs, (1, 28, 28), 10), lr=0.05, batch_size=20, repetitions=n
        ),
        lambda: against_float32("eden:bits=2", n),
        lambda: against_registered_clients(n),
        memory,
        lambda: start_up(n),
    ):
        bars.append(measure())
        if not arguments.json:
            print(bars[-1].line(), flush=True)
    if arguments.json:
        print(json.dumps([{"name": b.name, "value": b.value, "limit": b.limit, "met": b.met} for b in bars], indent=2))
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
