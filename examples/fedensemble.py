"""FedEnsemble: the server learns several models at once and predicts with all of them.

Each member sees a part of the turns only, so that an ensemble wants more rounds than one model.
"""

import laconic as lc


def main(rounds: int = 30) -> None:
    data = lc.data.digits(clients=20, partition={"kind": "dirichlet", "alpha": 1.0})
    solver = lc.Solver(lr=0.1, local_epochs=3)
    print(f"{'members':8}{'accuracy':>9}{'loss':>8}{'MB up':>8}{'MB down':>9}{'model.lac':>11}")
    for members in (1, 3):
        method = lc.fedensemble(members=members, solver=solver)
        run = lc.fit(method=method, data=data, rounds=rounds, cohort=10, eval_every=rounds, workers=0)
        summary = run.summary
        print(
            f"{members:<8}{summary['global_accuracy']:9.3f}{summary['global_loss']:8.3f}"
            f"{summary['bytes_up'] / 1e6:8.2f}{summary['bytes_down'] / 1e6:9.2f}{summary['model_bytes']:9,} B"
        )


if __name__ == "__main__":
    main()
