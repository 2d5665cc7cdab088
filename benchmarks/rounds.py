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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import laconic as lc
from benchmarks.bare import BareLoop
from laconic.core import Precision, sample_cohort
from laconic.engine import Record, Simulation
from laconic.experiment import Layout, RunSettings, experiment
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


def images(clients: int, per_client: int = 600, shape: tuple[int, ...] = (1, 28, 28)) -> lc.Federation:
    """Random images of MNIST's size (or another): time does not depend on what they show."""
    rng = np.random.default_rng(0)
    n = min(clients * per_client, 60_000)
    x = rng.random((n, *shape), dtype=np.float32)
    y = rng.integers(0, 10, n)
    return lc.Federation.from_arrays((x, y), (x[:100], y[:100]), clients=clients)


def laconic_rounds(
    federation: lc.Federation,
    model: Callable[[], nn.Module],
    *,
    up: str = "float32",
    down: str = "float32",
    **solver: Any,
) -> Iterator[Record]:
    return iter(simulation(federation, model, up=up, down=down, **solver))


def simulation(
    federation: lc.Federation,
    model: Callable[[], nn.Module],
    *,
    up: str = "float32",
    down: str = "float32",
    precision: Precision = "float32",
    layout: Layout = "auto",
    **solver: Any,
) -> Simulation:
    run = RunSettings(
        rounds=100_000,
        cohort=10,
        eval_every=100_000,
        evaluations=("global",),
        workers=2,
        precision=precision,
        layout=layout,
    )
    method = lc.fedavg(solver=lc.Solver(**{"local_epochs": 1, **solver}))
    return experiment(data=federation, model=model, method=method, up=up, down=down, run=run, hashed=False).simulation


@dataclass(frozen=True)
class Race:
    """Networks and data on which laconic races the bare loop, and the bars by precision."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    per_client: int
    lr: float
    batch_size: int
    bars: Mapping[Precision, float]
    best: float | None = None
    """The bar against the bare loop at its own best: bfloat16 and channels-last."""
    epochs: int = 1


RACES = (
    Race(
        "MLP 784-200-10, B=10",
        partial(mlp, (1, 28, 28), 10, hidden=(200,)),
        (1, 28, 28),
        600,
        0.1,
        10,
        {"float32": 0.9},
    ),
    Race(
        "digits MLP 64-64-10, B=10, E=5",
        partial(mlp, (1, 8, 8), 10),
        (1, 8, 8),
        28,
        0.1,
        10,
        {"float32": 0.8},
        epochs=5,
    ),
    Race(
        "LeNet5-FS, 32×32×3, B=64",
        partial(lenet5_fs, (3, 32, 32), 10),
        (3, 32, 32),
        500,
        0.05,
        64,
        {"float32": 0.85, "bfloat16": 0.45},
        best=1.05,
    ),
    Race(
        "LeNet5-FS, 28×28×1, B=20",
        partial(lenet5_fs, (1, 28, 28), 10),
        (1, 28, 28),
        600,
        0.05,
        20,
        {"float32": 0.95, "bfloat16": 0.7},
        best=1.05,
    ),
)


def race(entry: Race, repetitions: int) -> Iterator[Bar]:
    """Round times against the bare two-process float32 loop, all interleaved in one run."""
    federation = images(100, entry.per_client, entry.shape)
    solver: dict[str, Any] = {"lr": entry.lr, "batch_size": entry.batch_size}
    mine = {
        precision: simulation(federation, entry.build, precision=precision, local_epochs=entry.epochs, **solver)
        for precision in entry.bars
    }
    loop = partial(BareLoop, entry.build, federation, epochs=entry.epochs, **solver)
    ours = {precision: iter(run) for precision, run in mine.items()}
    agreement = mine["float32"].agreement
    first = [leaf.clone() for leaf in mine["float32"].state.server.values()]
    bare = {"bare": loop(agreement, first)}
    if entry.best is not None:
        bare["bare at its best"] = BareLoop(
            entry.build, federation, agreement, first, epochs=entry.epochs, quick=True, **solver
        )
    number = dict.fromkeys((*bare, *ours), 0)

    def round_of(which: str) -> None:
        number[which] += 1
        if which in ours:
            next(ours[which])
        else:
            bare[which].round(number[which], sample_cohort(agreement.round_key(number[which]), clients=100, cohort=10))

    for which in number:
        round_of(which)
    # They make the same steps: bit for bit but for sums, when images lie in memory as the bare loop has them.
    same = simulation(federation, entry.build, layout="contiguous", local_epochs=entry.epochs, **solver)
    next(rounds := iter(same))
    rounds.close()  # type: ignore[attr-defined]
    for weight, leaf in zip(bare["bare"].weights, same.state.server.values(), strict=True):
        torch.testing.assert_close(weight, leaf, rtol=1e-3, atol=1e-5)
    seconds: dict[str, list[float]] = {which: [] for which in number}
    count = 3 if entry.shape[-1] > 8 else 20
    for repetition in range(repetitions):
        for which in seconds if repetition % 2 else reversed(seconds):
            began = time.perf_counter()
            for _ in range(count):
                round_of(which)
            seconds[which].append((time.perf_counter() - began) / count)
    for one in bare.values():
        one.close()
    for run in ours.values():
        run.close()  # type: ignore[attr-defined]

    def ratio(which: str, against: str, limit: float) -> Bar:
        value = statistics.median(a / b for a, b in zip(seconds[which], seconds[against], strict=True))
        detail = f"{statistics.median(seconds[which]):.3f} s / {statistics.median(seconds[against]):.3f} s"
        return Bar(f"{entry.name}, {which}, round time / {against} loop", value, limit, detail)

    for precision, limit in entry.bars.items():
        yield ratio(precision, "bare", limit)
    if entry.best is not None:
        yield ratio("bfloat16", "bare at its best", entry.best)


def interleaved(name: str, runs: dict[str, Iterator[Record]], *, limit: float, rounds: int, repetitions: int) -> Bar:
    """The second run's time over the first one's, one after the other."""
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


def both_ways(codec: str, repetitions: int) -> Bar:
    """Ten of 100 clients a round, each with a frame from the tree that it holds."""
    federation, build = images(100, 500, (3, 32, 32)), partial(lenet5_fs, (3, 32, 32), 10)
    links = {"float32": {}, codec: {"up": codec, "down": codec}}
    runs = {name: laconic_rounds(federation, build, lr=0.05, batch_size=64, **link) for name, link in links.items()}
    name = f"LeNet5-FS, 32×32×3, round time, {codec} both ways, a memory per client / float32"
    return interleaved(name, runs, limit=1.15, rounds=2, repetitions=repetitions)


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
from laconic.experiment import RunSettings, experiment
from laconic.models import mlp
rng = np.random.default_rng(0)
x, y = rng.random((8000, 784), dtype=np.float32), rng.integers(0, 10, 8000)
federation = lc.Federation.from_arrays((x, y), (x[:100], y[:100]), clients=2000)
run = RunSettings(rounds=2, cohort=int(sys.argv[1]), eval_every=2, evaluations=("global",), workers=2)
method = lc.fedavg(solver=lc.Solver(local_epochs=1, batch_size=4, lr=0.1))
model = partial(mlp, (784,), 10, hidden=(1000,))
made = experiment(data=federation, model=model, method=method, run=run, hashed=False)
def peak():  # of this image alone: ru_maxrss remembers what the process was before exec
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
for _ in made.simulation:
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


_PSS = """
import gc, os, sys, time
from functools import partial
import torch
from benchmarks.rounds import RACES, images, simulation
from benchmarks.bare import BareLoop
from laconic.core import sample_cohort
torch.set_num_threads(1)
entry = next(race for race in RACES if race.shape == (1, 28, 28) and race.best)
data, solver = images(100, entry.per_client, entry.shape), {"lr": entry.lr, "batch_size": entry.batch_size}
run = simulation(data, entry.build, **solver)
if sys.argv[1] == "laconic":
    loop = iter(run)
    for _ in range(3): next(loop)
else:
    first = [leaf.clone() for leaf in run.state.server.values()]
    loop = BareLoop(entry.build, data, run.agreement, first, **solver)
    for number in range(1, 4):
        loop.round(number, sample_cohort(run.agreement.round_key(number), clients=100, cohort=10))
def pss(process):
    lines = open(f"/proc/{process}/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
tree = [os.getpid(), *map(int, open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split())]
print(sum(map(pss, tree)))
loop.close()
"""


def proportional_memory() -> Bar:
    """Proportional set sizes of all processes of a run, data and imports included, over those of the bare loop."""
    said = {}
    for which in ("laconic", "bare"):
        command = [sys.executable, "-c", _PSS, which]
        said[which] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024
    detail = f"{said['laconic']:.0f} / {said['bare']:.0f} MiB"
    name = "LeNet5-FS, 28×28×1, memory of all processes (PSS) / bare loop"
    return Bar(name, said["laconic"] / said["bare"], 1.2, detail)


_START = """
import time
began = time.time()
import laconic as lc
from laconic.experiment import experiment
next(iter(experiment(data=lc.data.digits(clients=50), hashed=False).simulation))
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
    measures: list[Callable[[], Iterable[Bar]]] = [
        *(partial(race, entry, n) for entry in RACES),
        lambda: [against_float32("eden:bits=2", n)],
        lambda: [both_ways("eden:bits=1", n)],
        lambda: [against_registered_clients(n)],
        lambda: [memory()],
        lambda: [proportional_memory()],
        lambda: [start_up(n)],
    ]
    for measure in measures:
        for bar in measure():
            bars.append(bar)
            if not arguments.json:
                print(bar.line(), flush=True)
    if arguments.json:
        print(json.dumps([{"name": b.name, "value": b.value, "limit": b.limit, "met": b.met} for b in bars], indent=2))
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
