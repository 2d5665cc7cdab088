"""Six methods on scikit-learn's digits, the same data and the same network: what each costs and gains.

Ten clients, each with its own mix of digits; all of them train in every round.
"""

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from laconic.comparison import compare_tables, terminal
from laconic.config import sections

CONDITIONS: dict[str, Any] = {
    "run": {"cohort": 10, "eval_every": 5, "evaluations": ["global", "local", "ensemble"]},
    "data": {"source": "digits", "clients": 10, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"name": "mlp", "hidden": [256], "init": "glorot"},
}
SGD = {"lr": 0.3, "local_epochs": 2, "batch_size": 16}
ADAM = {"optimizer": "adam", "batch_size": 32}
METHODS: dict[str, Any] = {
    "FedAvg": {"method": {"name": "fedavg", **SGD}},
    "FedAvg + EDEN": {"method": {"name": "fedavg", **SGD}, "link": {"up": "eden:bits=2", "down": "eden:bits=2"}},
    # Neurons that do not pay are closed for good.
    "FedSparse": {
        "method": {
            **{"name": "fedsparse", "lambda0": 2e-4, "threshold_lr": 3e-3, "server": {"name": "adam", "lr": 0.005}},
            **{**SGD, "lr": 0.05},
        }
    },
    # A bit per weight: masks of a frozen random network.
    "FedPM": {"method": {"name": "fedpm", **ADAM, "lr": 0.1, "local_epochs": 3}},
    # Weights that are mostly noise are neither sent nor kept.
    "variational dropout": {
        "method": {
            **{"name": "vardrop", "sigma_lr": 3.0, "kl_start": 10.0, "kl_full": 30.0},
            **{**ADAM, "lr": 0.01, "local_steps": 8},
        }
    },
    # Twenty rounds of FedAvg; then the first layer is each client's own, and only the last one travels.
    "LG-FedAvg": {"method": {"name": "lg_fedavg", "fedavg_rounds": 20, **SGD}},
}


def main(rounds: int = 50, seeds: int = 3, out: str = "runs/demo") -> None:
    began = time.perf_counter()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)  # a file has no edge to wrap at
    console.print(f"six methods, ten clients, {rounds} rounds, {seeds} seeds: about two minutes on two cores\n")
    run = {**CONDITIONS["run"], "rounds": rounds}
    tables = [(name, sections({**CONDITIONS, "run": run, **own}, where=name)) for name, own in METHODS.items()]
    found = compare_tables(tables, out=out, seeds=seeds, target=0.9, overwrite=True)
    console.print(terminal(found.table))
    for note in found.notes():
        console.print(note)
    console.print("bytes are lengths of real messages, bits are per parameter and message; docs/compare.md says more\n")
    console.print(f"table   {out}/table.md, .csv, .json")
    page = found.report(Path(out) / "report.html")
    if page is not None:
        console.print(f"report  {page}")
    console.print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
