"""Accuracy against bytes: three methods and a codec under equal conditions, two seeds each, on all cores.

Run it twice: the second time it finds what the first one made. The same from the command line:
laconic compare fedavg fedavg@eden:bits=2 fedprox:mu=0.1 fedsparse --base examples/digits.toml --seeds 2 --target 0.9
"""

import sys
from pathlib import Path
from typing import Any

import laconic as lc


def main(rounds: int = 8, out: str = "runs/example") -> None:
    solver = lc.Solver(lr=0.2, local_epochs=2)
    entries: dict[str, Any] = {
        "fedavg": lc.fedavg(solver=solver),
        "fedavg, 2 bits up": {"method": lc.fedavg(solver=solver), "up": "eden:bits=2"},
        "fedavg, 2 up, 4 down": {"method": lc.fedavg(solver=solver), "up": "eden:bits=2", "down": "eden:bits=4"},
        "fedprox": lc.fedprox(mu=0.1, solver=solver),
        "fedsparse": lc.fedsparse(solver=solver),
    }
    found = lc.compare(
        entries,
        data=lc.data.digits(clients=20, partition={"kind": "dirichlet", "alpha": 0.5}),
        seeds=2,
        rounds=rounds,
        cohort=10,
        eval_every=2,
        target=0.9,
        out=out,
    )
    print(found.to_markdown())
    cheapest = min(found.table, key=lambda row: row["bytes_to_target"] or float("inf"))
    print(f"90 % in the fewest bytes: {cheapest['name']}, {cheapest['bytes_to_target'] or 0:,.0f}")
    try:
        found.plot().figure.savefig(Path(out) / "accuracy.svg")
        print(f"the picture: {Path(out) / 'accuracy.svg'}")
    except lc.ConfigError as missing:  # without matplotlib
        print(missing, file=sys.stderr)


if __name__ == "__main__":
    main()
