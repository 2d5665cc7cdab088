"""What masks and noise cost: FedPM's and vardrop's local updates, coding a mask, the engine beside synchronous SGD.

Ratios are medians of interleaved repetitions in one run. `python -m benchmarks.masks`; run it with nothing else going.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import laconic as lc
from benchmarks.rounds import Bar, images
from benchmarks.sparse import EXAMPLES, federation, interleaved, update
from laconic.codecs import parse
from laconic.core import Key, Leaf, Shared
from laconic.engine import Simulation
from laconic.experiment import RunSettings, experiment

BATCH = 128


def client_updates(repetitions: int) -> list[Bar]:
    """FedPM on Conv-4 at width ¼ and vardrop on LeNet5, against plain steps on the same network."""
    data = federation((1, 28, 28))
    passes = lc.Solver(local_epochs=3, batch_size=BATCH)
    scores = lc.Solver(optimizer="adam", lr=0.1, local_epochs=3, batch_size=BATCH)
    once = lc.Solver(optimizer="adam", lr=1e-3, local_steps=1, batch_size=BATCH)
    updates = {
        "fedavg": update(lc.fedavg(solver=passes), data, "conv4", width=0.25),
        "fedpm": update(lc.fedpm(solver=scores), data, "conv4", width=0.25),
        "plain": update(lc.fedavg(solver=once), data, "lenet5"),
        "vardrop": update(lc.vardrop(solver=once), data, "lenet5"),
    }
    seconds = interleaved(updates, repetitions)
    steps = 3 * -(-EXAMPLES // BATCH)
    return [
        Bar(
            "FedPM / FedAvg local update, Conv-4 at width 1/4",
            seconds["fedpm"] / seconds["fedavg"],
            1.6,
            f"an update of {steps} steps takes FedAvg {seconds['fedavg']:.3f} s",
        ),
        Bar(
            "variational / plain step, LeNet5",
            seconds["vardrop"] / seconds["plain"],
            2.6,
            f"a plain step takes {seconds['plain']:.3f} s",
        ),
    ]


def coding(repetitions: int) -> Bar:
    """A mask of Conv-6, polarised as in training, with its probabilities known to both ends."""
    key, size = Key.from_seed(0), 2_262_602
    theta = torch.from_numpy(key.fold_in("theta").numpy().beta(0.5, 0.5, size).astype("float32"))
    theta = theta.mul(10).round().div(10).mul(0.98).add(0.01)  # eleven values, as ten masks make
    bits = torch.from_numpy(key.fold_in("bits").numpy().random(size, dtype="float32")) < theta
    spec = {"mask": Leaf((size,), torch.bool, expected=theta)}
    shared = Shared.of(spec, key)
    codec = parse("mask")
    payload = b""

    def both(_: int) -> None:
        nonlocal payload
        payload, _state = codec.encode({"mask": bits}, shared, {})
        assert torch.equal(codec.decode(payload, spec, shared)["mask"], bits)

    seconds = interleaved({"mask": both}, repetitions)["mask"]
    return Bar(
        "encode + decode of a Conv-6 mask, seconds", seconds, 0.3, f"{8 * len(payload) / size:.4f} bits per parameter"
    )


def timed(simulation: Simulation) -> Callable[[], float]:
    """Seconds spent in the method's own functions from now on: what any loop would have to compute."""
    spent, depth = 0.0, 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal spent, depth
            began, depth = time.perf_counter(), depth + 1
            try:
                return function(*args)
            finally:
                depth -= 1
                if not depth:
                    spent += time.perf_counter() - began

        return call

    bound = simulation.method
    assert bound.replica is not None
    watching = replace(
        bound,
        client_update=watched(bound.client_update),
        server_update=watched(bound.server_update),
        replica=bound.replica._replace(absorb=watched(bound.replica.absorb)),
    )
    simulation.agreement = replace(simulation.agreement, method=watching)
    return lambda: spent


def overhead(rounds: int, *, label: str, **settings: float) -> Bar:
    """What an iteration costs beside the devices' gradients and the optimizer's step, with 4 devices in one process."""
    data = images(4, per_client=1200)
    run = RunSettings(rounds=2 * rounds, cohort=4, eval_every=10**6, evaluations=("global",), workers=0)
    made = experiment(data=data, model="lenet5", method=lc.vardrop(**settings), run=run, hashed=False)
    spent, before = timed(made.simulation), 0.0
    ratios, sent, seconds = [], 0.0, 0.0
    for record in made.simulation:
        computed, before = spent() - before, spent()
        if record.round > rounds:  # the first ones are for warming up
            ratios.append((record.seconds - computed) / computed)
            sent, seconds = record.clients["gradients_sent"], record.seconds
    return Bar(
        f"engine overhead / compute of an iteration, LeNet5, 4 devices, {label}",
        statistics.median(ratios),
        0.10,
        f"{100 * sent:.1f} % of the gradients sent, {seconds:.3f} s",
    )


def main(repetitions: int = 15) -> None:
    """Measure, print, and exit with 1 where a bar is missed."""
    torch.set_num_threads(1)
    bars = [
        *client_updates(repetitions),
        coding(repetitions),
        overhead(2 * repetitions, kl_scale=0.0, label="dense"),
        overhead(2 * repetitions, first_log_sigma2=-1.0, label="sparse"),
    ]
    for bar in bars:
        print(bar.line())
    sys.exit(not all(bar.met for bar in bars))


if __name__ == "__main__":
    main()
