"""The EM family on scikit-learn's digits: five methods, the same data, every byte counted.

Fifty clients, each with its own mix of digits; ten of them train in every round.
"""

from rich.console import Console
from rich.table import Table

import laconic as lc
from laconic.progress import Display, size

METHODS = {
    "fedavg": lc.fedavg(),
    "fedprox": lc.fedprox(mu=0.01),
    "fedopt (Adam)": lc.fedopt(),
    "fedmedian": lc.fedmedian(),
    "fedensemble": lc.fedensemble(members=3),
}


def main(rounds: int = 60) -> None:
    console = Console()
    data = lc.data.digits(clients=50, partition={"kind": "dirichlet", "alpha": 1.0})
    console.print(f"{data}\n", highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("method", "accuracy", "local accuracy", "up", "down", "bits up", "seconds"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, method in METHODS.items():
        console.rule(name, align="left")
        display = Display(Console(stderr=True))
        summary = lc.fit(method=method, data=data, rounds=rounds, cohort=10, eval_every=10, observer=display).summary
        table.add_row(
            name,
            f"{100 * summary['global_accuracy']:.1f} %",
            f"{100 * summary['local_accuracy']:.1f} %",
            size(summary["bytes_up"]),
            size(summary["bytes_down"]),
            f"{summary['bits_per_parameter_up']:.2f}",
            f"{summary['seconds']:.1f}",
        )
    console.print()
    console.print(table)
    console.print("\naccuracy: the server's model on the common test set; local: clients' own on their own data;")
    console.print("bits up: per parameter and message, from the length of real frames")


if __name__ == "__main__":
    main()
