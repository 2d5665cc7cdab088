"""Curves from the records of runs, as SVG. Needs matplotlib.

python results/plot.py results/em out.svg                       accuracy against rounds
python results/plot.py results/codecs out.svg up                against megabytes sent up
python results/plot.py results/sparse out.svg both cifar10-     against megabytes both ways, of some runs
python results/lg/plot.py results/lg out.svg local mnist-          devices' own models, against rounds
python results/lg/plot.py results/lg out.svg newcomer rotated-     a device that joins later (dashed), and the others
python results/lg/plot.py results/lg out.svg fairness adult-iid-   accuracy against what an adversary tells, over lambda
"""

import json
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

LABELS = {"up": "MB sent up by all clients", "both": "MB sent by and to all clients"}
PROTECTED = {"posthoc_auc_0": "race", "posthoc_auc_1": "sex"}


def curves(axes: Axes, folder: Path, against: str, family: str) -> None:
    """Accuracy of every run against rounds or bytes."""
    figure = "local_accuracy" if against == "local" else "global_accuracy"
    for path in sorted(folder.glob(f"{family}*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        spent, xs, ys = 0, [], []
        for record in records:
            spent += record["bytes_up"] + (record["bytes_down"] if against == "both" else 0)
            if figure in record:
                xs.append(spent / 1e6 if against in LABELS else record["round"])
                ys.append(100 * record[figure])
        (line,) = axes.plot(xs, ys, label=path.stem.removeprefix(family), linewidth=1.2)
        if against == "newcomer":
            late = [(r["round"], 100 * r["newcomer_accuracy"]) for r in records if "newcomer_accuracy" in r]
            axes.plot(*zip(*late, strict=True), "--", color=line.get_color(), linewidth=1.2)
    axes.set_xlabel(LABELS.get(against, "round"))
    if against in LABELS:
        axes.set_xscale("log")
    axes.set_ylabel(f"{figure.replace('_', ' ')}, %")


def fairness(axes: Axes, folder: Path, family: str) -> None:
    """Devices' accuracy against the AUC of an adversary that was fitted afterwards; runs are joined over λ."""
    points = []
    for path in folder.glob(f"{family}*.summary.json"):
        name = re.sub(r"-s[0-9]+$", "", path.name.removesuffix(".summary.json").removeprefix(family))
        strength = re.search(r"-w([0-9.]+)$", name)
        points.append((float(strength[1]) if strength else -1.0, name, json.loads(path.read_text())))
    for figure, attribute in PROTECTED.items():
        order = sorted(points, key=lambda point: point[:2])
        color = f"C{list(PROTECTED).index(figure)}"
        for kind, style in (("lg-adversary", "o:"), ("lg-opponent", "o-")):
            fought = [(100 * s[figure], 100 * s["local_accuracy"]) for w, n, s in order if w >= 0 and n.startswith(kind)]
            if fought:
                axes.plot(*zip(*fought, strict=True), style, color=color, markersize=3, label=f"{kind}, {attribute}")
        for strength, name, summary in order:
            at = (100 * summary[figure], 100 * summary["local_accuracy"])
            if strength < 0:
                marker = "s" if name == "fedavg" else "^"
                axes.plot(*at, marker=marker, color=color, label=f"{name}, {attribute}", linestyle="")
            else:
                axes.annotate(f"{strength:g}", at, fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.axvspan(45, 55, alpha=0.1)
    axes.set_xlabel("AUC of an adversary fitted afterwards, %")
    axes.set_ylabel("local accuracy, %")


def main(folder: Path, out: Path, against: str = "rounds", family: str = "") -> None:
    """Draw the runs of a folder whose names begin with `family`."""
    plt.rcParams["svg.hashsalt"] = "laconic"
    figure, axes = plt.subplots(figsize=(7, 4.2))
    if against == "fairness":
        fairness(axes, folder, family)
    else:
        curves(axes, folder, against, family)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
