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
from laconic.core import Key
from laconic.engine import Schedule
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
    schedule = Schedule(rounds=100_000, cohort=10, eval_every=100_000, local_eval=False, workers=2)
    method = lc.fedavg(solver=lc.Solver(local_epochs=1, **solver))
    task = make_task(federation, model)
    return iter(prepare(method=method, task=task, federation=federation, schedule=schedule, seed=0, up=up))


def against_bare_loop(
    name: str, build: Callable[[], nn.Module], *, lr: float, batch_size: int, repetitions: int
) -> Bar:
    federation = images(100)
    ours = laconic_rounds(federation, build, lr=lr, batch_size=batch_size)
    next(ours)
    bare = BareLoop(build, federation, lr=lr, batch_size=batch_size)
    bare.round(0, list(range(10)))
    key = Key.from_seed(0)
    ratios, seconds = [], []
    for repetition in range(repetitions):
        took = {"bare": 0.0, "ours": 0.0}
        for which in ("bare", "ours") if repetition % 2 else ("ours", "bare"):
            began = time.perf_counter()
            for number in range(3):
                if which == "ours":
                    next(ours)
                else:
                    cohort = key.fold_in(repetition, number).numpy().choice(100, 10, replace=False)
                    bare.round(repetition * 3 + number + 1, [int(c) for c in cohort])
            took[which] = time.perf_counter() - began
        ratios.append(took["ours"] / took["bare"])
        seconds.append((took["ours"] / 3, took["bare"] / 3))
    bare.close()
    ours.close()  # type: ignore[attr-defined]
    mine, theirs = (statistics.median(s[i] for s in seconds) for i in (0, 1))
    return Bar(f"{name}, round time / bare loop", statistics.median(ratios), 1.10, f"{mine:.3f} s / {theirs:.3f} s")


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
    few = images(100, 600)
    # The same work in each round: clients of the large federation borrow the small one's data.
    crowd = _Crowd(few, 100_000)
    build = partial(mlp, (1, 28, 28), 10, hidden=(200,))
    runs = {
        "few": laconic_rounds(few, build, lr=0.1, batch_size=10),
        "many": laconic_rounds(crowd, build, lr=0.1, batch_size=10),  # type: ignore[arg-type]
    }
    name = "round time, 100,000 / 100 registered clients"
    return interleaved(name, runs, limit=1.15, rounds=5, repetitions=repetitions)


class _Crowd:
    """A federation of very many clients whose data repeats."""

    def __init__(self, federation: lc.Federation, clients: int) -> None:
        self._federation, self.num_clients = federation, clients

    def client(self, client: int) -> lc.ClientData:
        return self._federation.client(client % self._federation.num_clients)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._federation, name)


_MEMORY = """
import resource, sys
import laconic as lc
from benchmarks.rounds import images, _Crowd
from functools import partial
from laconic.engine import Schedule
from laconic.experiment import make_task, prepare
from laconic.models import mlp
federation = _Crowd(images(100, 60), 2000)
schedule = Schedule(rounds=2, cohort=int(sys.argv[1]), eval_every=2, local_eval=False, workers=2)
method = lc.fedavg(solver=lc.Solver(local_epochs=1, batch_size=20, lr=0.1))
task = make_task(federation, partial(mlp, (1, 28, 28), 10, hidden=(1000,)))
def rss():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
before = rss()
for _ in prepare(method=method, task=task, federation=federation, schedule=schedule, seed=0):
    pass
print(before, rss())
"""


def memory() -> Bar:
    peaks = {}
    for cohort in (10, 1000):
        said = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(cohort)], capture_output=True, text=True, check=True
        ).stdout
        peaks[cohort] = int(said.split()[1])
    return Bar(
        "peak memory, cohort 1,000 / cohort 10",
        peaks[1000] / peaks[10],
        1.2,
        f"{peaks[1000] / 1024:.0f} MiB / {peaks[10] / 1024:.0f} MiB",
    )


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
