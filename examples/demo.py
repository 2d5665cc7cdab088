"""Six methods on scikit-learn's digits, the same data and the same network: what each costs and gains.

Twenty clients, each with its own mix of digits; ten of them train in every round.
"""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

import laconic as lc
from laconic.comparison import terminal

SOLVER = lc.Solver(lr=0.3, local_epochs=2, batch_size=16)
METHODS: dict[str, Any] = {
    "FedAvg": lc.fedavg(solver=SOLVER),
    "FedAvg + EDEN": {"method": lc.fedavg(solver=SOLVER), "up": "eden:bits=2", "down": "eden:bits=4"},
    "FedSparse": lc.fedsparse(sparsity="high", solver=lc.Solver(lr=0.1, local_epochs=2, batch_size=16)),
    # A bit per weight: masks of a frozen random network.
    "FedPM": lc.fedpm(scale="kaiming", solver=lc.Solver(optimizer="adam", lr=0.1, local_epochs=5, batch_size=16)),
    "variational dropout": lc.vardrop(
        first_log_sigma2=-8.0,
        sigma_lr=3.0,
        kl_scale=0.02,
        kl_start=3.0,
        kl_full=30.0,
        solver=lc.Solver(optimizer="adam", lr=5e-3, local_steps=10, batch_size=32),
    ),
    # Thirty rounds of FedAvg; then the first layer is each client's own, and only the last one travels.
    "LG-FedAvg": lc.lg_fedavg(global_layers=1, fedavg_rounds=30, solver=SOLVER),
}


def main(rounds: int = 60, seeds: int = 3, out: str = "runs/demo") -> None:
    began = time.perf_counter()
    console = Console()
    data = lc.data.digits(clients=20, partition={"kind": "dirichlet", "alpha": 0.5})
    console.print(f"{data}, {rounds} rounds, {seeds} seeds\n", highlight=False)
    found = lc.compare(
        METHODS,
        data=data,
        init="glorot",
        rounds=rounds,
        cohort=10,
        eval_every=5,
        seeds=seeds,
        target=0.9,
        out=out,
        overwrite=True,
    )
    console.print(terminal(found.table))
    for note in found.notes():
        console.print(note, highlight=False)
    console.print(
        "up, down: bytes of real messages; bits: per parameter and message; docs/compare.md explains the rest"
    )
    page = found.report(Path(out) / "report.html")
    console.print(f"\nfiles   {out}", highlight=False)
    if page is not None:
        console.print(f"report  {page}", highlight=False)
    console.print(f"{time.perf_counter() - began:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
