"""What 10,000 clients with 600,000 parameters each hold of the way down: memory and disk, with a budget and without.

`python -m benchmarks.memories` (about 1.2 GiB of disk in the folder of `--out`); `--small` a trial of the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import laconic as lc
from benchmarks.rounds import Bar
from laconic.core import num_bytes
from laconic.engine import RunDirectory, execute
from laconic.experiment import RunSettings, experiment


def run(out: Path, *, clients: int, cohort: int, rounds: int, width: int, memory: str) -> dict[str, Any]:
    """One run with EDEN at a bit both ways and memories on disk; what it holds at its end, and its peak."""
    rng = np.random.default_rng(0)
    x, y = rng.random((8 * clients, 16), dtype=np.float32), rng.integers(0, 10, 8 * clients)
    data = lc.Federation.from_arrays((x, y), (x[:100], y[:100]), clients=clients)
    settings = RunSettings(
        rounds=rounds, cohort=cohort, eval_every=rounds, evaluations=("global",), workers=0, store="disk"
    )
    made = experiment(
        data=data,
        model_settings={"hidden": [width, width]},
        method=lc.fedavg(solver=lc.Solver(lr=0.05, local_epochs=1, batch_size=8)),
        up="eden:bits=1",
        down="eden:bits=1",
        memory=memory,
        run=settings,
        hashed=False,
    ).simulation
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    execute(made, {}, facts={}, directory=RunDirectory(out, "r"), checkpoint_every=rounds)
    memories = made.state.memories
    assert memories is not None
    held = sum(path.stat().st_size for path in (out / "r" / "clients" / "memory").glob("*.state"))
    return {
        "parameters": sum(leaf.size for leaf in made.method.task.spec.values()),
        "held": len(memories.contacts),
        "held_bytes": memories.held_bytes,
        "disk_bytes": held,
        "grown_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
    }


def main() -> int:
    """Measure, print, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a trial: fewer clients and parameters")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure")
    options = parser.parse_args()
    scale = {"clients": 200, "cohort": 20, "rounds": 4, "width": 64} if options.small else {}
    full = {"clients": 10_000, "cohort": 50, "rounds": 12, "width": 768, **scale}
    bars = []
    for memory in ("200 kB", "0 B") if options.small else ("1 GiB", "0 B"):
        with tempfile.TemporaryDirectory(dir=options.out) as out:
            context = multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:
                found = pool.apply(run, (Path(out),), {**full, "memory": memory})
        budget = num_bytes(memory, what="memory")
        detail = f"{found['held']} trees of {found['parameters']:,} parameters"
        bars.append(Bar(f"bytes of trees, budget {memory}", found["held_bytes"], budget, detail))
        # Checkpoints keep what the newest two and the first mean: here only the end holds any.
        bars.append(Bar(f"bytes of their files, budget {memory}", found["disk_bytes"], budget))
        bars.append(Bar(f"growth of memory in the run, GiB, budget {memory}", found["grown_bytes"] / 2**30, 1.0))
    for bar in bars:
        print(bar.line())
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
