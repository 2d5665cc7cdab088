"""Curves of accuracy from the records of runs, as SVG. Needs matplotlib: `python results/plot.py results/em out.svg`."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def main(folder: Path, out: Path, against: str = "rounds") -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for path in sorted(folder.glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        spent, xs, ys = 0, [], []
        for record in records:
            spent += record["bytes_up"]
            if "global_accuracy" in record:
                xs.append(record["round"] if against == "rounds" else spent / 1e6)
                ys.append(100 * record["global_accuracy"])
        axes.plot(xs, ys, label=path.stem, linewidth=1.2)
    axes.set_xlabel("round" if against == "rounds" else "MB sent up by all clients")
    if against != "rounds":
        axes.set_xscale("log")
    axes.set_ylabel("global accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
