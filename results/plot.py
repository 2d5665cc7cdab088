"""Curves of accuracy from the records of runs, as SVG. Needs matplotlib.

python results/plot.py results/em out.svg                       against rounds
python results/plot.py results/codecs out.svg up                against megabytes sent up
python results/plot.py results/sparse out.svg both cifar10-     against megabytes both ways, of some runs
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

LABELS = {"rounds": "round", "up": "MB sent up by all clients", "both": "MB sent by and to all clients"}


def main(folder: Path, out: Path, against: str = "rounds", family: str = "") -> None:
    """Draw the runs of a folder whose names begin with `family`."""
    plt.rcParams["svg.hashsalt"] = "laconic"
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for path in sorted(folder.glob(f"{family}*.jsonl")):
        spent, xs, ys = 0, [], []
        for line in path.read_text().splitlines():
            record = json.loads(line)
            spent += record["bytes_up"] + (record["bytes_down"] if against == "both" else 0)
            if "global_accuracy" in record:
                xs.append(record["round"] if against == "rounds" else spent / 1e6)
                ys.append(100 * record["global_accuracy"])
        axes.plot(xs, ys, label=path.stem.removeprefix(family), linewidth=1.2)
    axes.set_xlabel(LABELS[against])
    if against != "rounds":
        axes.set_xscale("log")
    axes.set_ylabel("global accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
