"""Markdown tables from the records of runs.

python results/table.py results/codecs float32            codecs against the row to compare with
python results/table.py results/sparse cifar10-fedavg     methods: sparsity, bytes both ways, size and compute
"""

import json
import sys
from pathlib import Path

GIB = 2**30


def runs(folder: Path, family: str) -> dict[str, dict]:
    """Summaries by name, each with its evaluations, of the runs whose names begin with `family`."""
    found = {}
    for path in sorted(folder.glob(f"{family}*.summary.json")):
        name = path.name.removesuffix(".summary.json")
        records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        judged = [100 * record["global_accuracy"] for record in records if "global_accuracy" in record]
        found[name] = {**json.loads(path.read_text()), "judged": judged}
    return found


def codecs(rows: dict[str, dict], base: dict) -> None:
    """What goes up, and what it costs in accuracy."""
    print("| up | accuracy, round 400 | mean of the last ten evaluations | local | MB up | bits/parameter | of float32's |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in sorted(rows.values(), key=lambda row: -row["bytes_up"]):
        print(
            f"| `{row['up']}` | {row['judged'][-1]:.2f} % | {sum(row['judged'][-10:]) / 10:.2f} % "
            f"| {100 * row['local_accuracy']:.2f} % | {row['bytes_up'] / 1e6:.1f} "
            f"| {row['bits_per_parameter_up']:.3f} | 1/{base['bytes_up'] / row['bytes_up']:.1f} |"
        )


def methods(rows: dict[str, dict], base: dict) -> None:
    """Sparsity, bytes both ways, and what the final model costs."""
    print("| run | accuracy | mean of the last ten | local | sparsity | GB up | GB down | bytes of FedAvg's | paper GiB | model.lac | multiply-adds |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    total = base["bytes_up"] + base["bytes_down"]
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["bytes_up"]):
        compute = row["multiply_adds"] / row["multiply_adds_whole"] if "multiply_adds" in row else 1.0
        size = f"{row['model_bytes'] / 1e6:.2f} MB" if "model_bytes" in row else "-"
        print(
            f"| {name} | {row['judged'][-1]:.2f} % | {sum(row['judged'][-10:]) / 10:.2f} % | {100 * row['local_accuracy']:.2f} % "
            f"| {100 * row.get('sparsity', 0):.1f} % | {row['bytes_up'] / 1e9:.2f} | {row['bytes_down'] / 1e9:.2f} "
            f"| {100 * (row['bytes_up'] + row['bytes_down']) / total:.1f} % | {row['paper_bytes'] / GIB:.2f} | {size} | {100 * compute:.0f} % |"
        )


if __name__ == "__main__":
    folder, reference = Path(sys.argv[1]), sys.argv[2]
    found = runs(folder, reference.split("-")[0] if "-" in reference else "")
    (methods if "-" in reference else codecs)(found, found[reference])
