"""A Markdown table from the records of runs: `python results/table.py results/codecs float32` (the row to compare with)."""

import json
import sys
from pathlib import Path


def main(folder: Path, reference: str) -> None:
    rows = {path.name.removesuffix(".summary.json"): json.loads(path.read_text()) for path in folder.glob("*.summary.json")}
    base = rows[reference]["bytes_up"]
    print("| up | accuracy, round 400 | mean of the last ten evaluations | local | MB up | bits/parameter | of float32's |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, summary in sorted(rows.items(), key=lambda row: -row[1]["bytes_up"]):
        records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        judged = [100 * record["global_accuracy"] for record in records if "global_accuracy" in record]
        print(
            f"| `{summary['up']}` | {judged[-1]:.2f} % | {sum(judged[-10:]) / 10:.2f} % "
            f"| {100 * summary['local_accuracy']:.2f} % | {summary['bytes_up'] / 1e6:.1f} "
            f"| {summary['bits_per_parameter_up']:.3f} | 1/{base / summary['bytes_up']:.1f} |"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
