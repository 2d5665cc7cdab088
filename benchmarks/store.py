"""Clients' states on disk against states in memory: time on 100 clients, memory with thousands.

`python -m benchmarks.store` makes the whole measurement (3,000 clients with 600k private parameters each: 7 GB of disk
in the folder of `--out`); `--small` a trial of the same. Run it with nothing else going.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import laconic as lc
from benchmarks.rounds import Bar
from laconic.engine import RunDirectory, execute
from laconic.experiment import RunSettings, experiment


def federation(clients: int) -> lc.Federation:
    """Random inputs, sixty-four examples per client: time does not depend on what they are."""
    rng = np.random.default_rng(0)
    parts = [(rng.random((64, 16), dtype=np.float32), rng.integers(0, 10, 64)) for _ in range(clients)]
    return lc.Federation.from_clients(parts, test_fraction=0.0, test=parts[0], classes=10)


def run(out: Path, *, clients: int, cohort: int, rounds: int, width: int, store: str) -> dict[str, Any]:
    """One run with states in `store`; what it took, and the most memory that this process ever had."""
    method = lc.lg_fedavg(global_layers=1, solver=lc.Solver(lr=0.01, local_epochs=5, batch_size=8))
    data = federation(clients)
    settings = RunSettings(
        rounds=rounds,
        cohort=cohort,
        eval_every=10**6,
        evaluations=("global",),
        workers=0,
        store=store,  # type: ignore[arg-type]
    )
    model = {"hidden": [width, width]}
    simulation = experiment(data=data, model_settings=model, method=method, run=settings, hashed=False).simulation
    began = time.perf_counter()
    result = execute(simulation, {}, facts={}, directory=RunDirectory(out, "r"), checkpoint_every=10)
    private = sum(leaf.size for name, leaf in simulation.method.task.spec.items() if not name.startswith("fc3"))
    return {
        "seconds": sum(record["seconds"] for record in result.history),
        "with_checkpoints": time.perf_counter() - began,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "private_parameters": private,
        "states": len(simulation.state.personal),
        "state_sha256": result.summary["state_sha256"],
    }


def apart(folder: Path, **settings: Any) -> dict[str, Any]:
    """A run in a process of its own, whose memory is its own too."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            return pool.apply(run, (Path(out),), settings)


def main() -> int:
    """Measure, print, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a trial: fewer clients and parameters")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    width = 64 if options.small else 768  # 16·768 + 768 + 768·768 + 768 = 603,648 private parameters
    rounds, cohort = (3, 5) if options.small else (20, 10)
    times: dict[str, list[float]] = {"memory": [], "disk": []}
    hashes = set()
    for _ in range(options.repeats):
        for store, seconds in times.items():
            found = apart(options.out, clients=100, cohort=cohort, rounds=rounds, width=width, store=store)
            seconds.append(found["with_checkpoints"])
            hashes.add(found["state_sha256"])
    # Every client trains: a cohort of a tenth of them, so that states also wait for the end of their round.
    many = 100 if options.small else 3000
    wide = apart(options.out, clients=many, cohort=many // 10, rounds=30, width=width, store="disk")
    ratio = statistics.median(times["disk"]) / statistics.median(times["memory"])
    bars = [
        Bar("disk store / memory store, 100 clients, checkpoints included", ratio, 1.3),
        Bar(
            f"GiB of memory with {wide['states']} states of {wide['private_parameters']:,} parameters",
            wide["peak_bytes"] / 2**30,
            2.0,
        ),
        Bar("different results of the two stores", len(hashes) - 1, 0),
    ]
    if options.json:
        print(json.dumps({"times": times, "wide": wide, "bars": {bar.name: bar.value for bar in bars}}, indent=2))
    else:
        for bar in bars:
            print(bar.line())
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
