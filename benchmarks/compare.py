"""Six methods with three seeds at a time on all cores, against one after the other with one worker each.

`python -m benchmarks.compare`; run it with nothing else going. Both ways run in turns, each in its own process, which
has imported everything before the clock starts; the ratio is the median over the repetitions. Results must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rounds import Bar
from laconic.report import find_runs, read_run

_SCRIPT = """
import sys, time
from pathlib import Path
from laconic.comparison import compare_tables, read_entries
from laconic.config import experiment_from
import sklearn.datasets

way, out, rounds = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
METHODS = ["fedavg", "fedavg@eden:bits=2", "fedsparse", "fedpm", "vardrop:local_steps=10", "lg_fedavg"]
entries = read_entries(METHODS, overrides=[f"run.rounds={rounds}", "data.clients=20", "model.hidden=[256]"])
began = time.perf_counter()
if way == "together":
    compare_tables(entries, out=out, seeds=3, progress=False)
else:
    for seed in range(3):
        for number, (_, table) in enumerate(entries):
            run = {**table["run"], "name": f"{number}-{seed}", "seed": seed, "workers": 1}
            experiment_from({**table, "run": run}).run(out=out)
print(time.perf_counter() - began)
"""


def seconds(way: str, out: Path, rounds: int) -> float:
    command = [sys.executable, "-c", _SCRIPT, way, str(out), str(rounds)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def hashes(out: Path) -> list[str]:
    found = (read_run(path) for path in find_runs(out))
    return sorted(record.summary["state_sha256"] for record in found if record.summary is not None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    took: dict[str, list[float]] = {"alone": [], "together": []}
    for repetition in range(arguments.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            for way in ("alone", "together") if repetition % 2 else ("together", "alone"):
                took[way].append(seconds(way, Path(folder) / way, arguments.rounds))
            if hashes(Path(folder) / "alone") != hashes(Path(folder) / "together"):
                print("FAIL  the results differ")
                return 1
    ratios = [together / alone for alone, together in zip(took["alone"], took["together"], strict=True)]
    together, alone = (statistics.median(took[way]) for way in ("together", "alone"))
    bar = Bar("6 methods × 3 seeds, compare / one after the other", statistics.median(ratios), 0.55)
    print(f"{bar.line()}{together:.1f} s / {alone:.1f} s, 18 runs with equal results")
    return 0 if bar.met else 1


if __name__ == "__main__":
    sys.exit(main())
