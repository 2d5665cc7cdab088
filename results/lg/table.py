"""Markdown tables from the records of runs.

python results/table.py results/codecs float32            codecs against the row to compare with
python results/table.py results/sparse cifar10-fedavg     methods: sparsity, bytes both ways, size and compute
python results/lg/table.py results/lg mnist-fedavg-s0        models of devices' own: two tests, bytes both ways, what a paper would print
python results/lg/table.py results/lg adult-iid-lg-s0        fairness: what representations give away
python results/lg/table.py results/lg rotated-iid-lg-c0.0    a device that joins later
"""

import json
import re
import statistics
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


def seeds(rows: dict[str, dict]) -> dict[str, list[dict]]:
    """The runs that differ in their seed only (`-s0`, `-s1` …), by what they have in common."""
    groups: dict[str, list[dict]] = {}
    for name, row in rows.items():
        groups.setdefault(re.sub(r"-s[0-9]+$", "", name), []).append(row)
    return groups


def spread(group: list[dict], figure: str) -> str:
    """The mean of a figure in per cent, with the standard deviation where there are several seeds."""
    values = [100 * row[figure] for row in group if row.get(figure) is not None]
    if not values:
        return "-"
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def personal(rows: dict[str, dict], base: dict) -> None:
    """Models of devices' own: two tests, bytes both ways, and the parameters that the paper would count."""
    print("| run | seeds | rounds | local test, % | new test, % | vote, % | GB up | GB down | of FedAvg's | paper's parameters |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    total = base["bytes_up"] + base["bytes_down"]
    for name, group in seeds(rows).items():
        row = group[0]
        sent = statistics.mean(r["bytes_up"] + r["bytes_down"] for r in group)
        # The paper counts the way down for all M devices: M + CM instead of 2CM.
        counted = row["paper_bytes"] / 8 / row["cohort"] * (row["clients"] + row["cohort"])
        print(
            f"| {name} | {len(group)} | {row['rounds']} | {spread(group, 'local_accuracy')} | {spread(group, 'new_accuracy')} "
            f"| {spread(group, 'vote_accuracy')} | {row['bytes_up'] / 1e9:.3f} | {row['bytes_down'] / 1e9:.3f} "
            f"| {100 * sent / total:.1f} % | {counted:.2e} |"
        )


def fairness(rows: dict[str, dict], base: dict) -> None:
    """Accuracy, and how well a fresh adversary tells race and sex from representations."""
    print("| run | seeds | local test, % | lost | new test, % | AUC, % | adversary's AUC: race, % | sex, % |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, group in seeds(rows).items():
        lost = 100 * (base["local_accuracy"] - statistics.mean(row["local_accuracy"] for row in group))
        figures = ("new_accuracy", "auc", "posthoc_auc_0", "posthoc_auc_1")
        rest = " | ".join(spread(group, figure) for figure in figures)
        print(f"| {name} | {len(group)} | {spread(group, 'local_accuracy')} | {lost:.2f} | {rest} |")


def newcomers(rows: dict[str, dict], base: dict) -> None:
    """The others' accuracy and the new device's."""
    print("| run | rounds | the others, global model, % | own models, % | ensemble, % | new device, turned, % |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in rows.items():
        figures = ("global_accuracy", "local_accuracy", "new_accuracy", "newcomer_accuracy")
        print(f"| {name} | {row['rounds']} | " + " | ".join(spread([row], f) for f in figures) + " |")


if __name__ == "__main__":
    folder, reference = Path(sys.argv[1]), sys.argv[2]
    family = reference.split("-")[0] if "-" in reference else ""
    kinds = {"adult": fairness, "rotated": newcomers}
    if family in kinds:
        family, kind = "-".join(reference.split("-")[:2]) + "-", kinds[family]
    else:
        kind = (personal if re.search(r"-s[0-9]+$", reference) else methods) if family else codecs
    found = runs(folder, family)
    kind(found, found[reference])
