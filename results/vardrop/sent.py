"""The share of gradients that is sent against epochs (the paper's figure 2): python results/vardrop/sent.py RUNS… OUT.svg"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

EXAMPLES, BATCH = 60_000, 128


def main(runs: list[Path], out: Path) -> None:
    """Draw the records (metrics.jsonl of run folders, or .jsonl files), averaged over a twentieth of an epoch."""
    plt.rcParams["svg.hashsalt"] = "laconic"
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for path in runs:
        file = path / "metrics.jsonl" if path.is_dir() else path
        records = [json.loads(line) for line in file.read_text().splitlines()]
        epoch = EXAMPLES / records[0]["cohort"] / BATCH
        size = max(1, round(epoch / 20))
        sent = [100 * record["gradients_sent"] for record in records]
        means = [sum(sent[i : i + size]) / len(sent[i : i + size]) for i in range(0, len(sent), size)]
        axes.plot(
            [(i + 0.5) * size / epoch for i in range(len(means))],
            means,
            label=path.stem.removesuffix("-s0"),
            linewidth=1.2,
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("gradients sent, %")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:-1]], Path(sys.argv[-1]))
