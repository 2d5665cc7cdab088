"""Federated dropout: every client trains a smaller network, cut out of the server's, and sends less both ways."""

import laconic as lc


def main(rounds: int = 15) -> None:
    data = lc.data.digits(clients=20, partition={"kind": "dirichlet", "alpha": 1.0})
    solver, server = lc.Solver(lr=0.1, local_epochs=3), lc.ServerOptimizer("adam", lr=0.01)
    methods = {
        "fedopt": lc.fedopt(server=server, solver=solver),
        "feddrop, a quarter": lc.feddrop(fc_rate=0.25, first_rate=0.25, server=server, solver=solver),
        "feddrop, half": lc.feddrop(fc_rate=0.5, first_rate=0.5, server=server, solver=solver),
    }
    for name, method in methods.items():
        run = lc.fit(method=method, data=data, rounds=rounds, cohort=10, eval_every=rounds, workers=0)
        summary = run.summary
        print(
            f"{name:20}{100 * summary['global_accuracy']:6.1f} %  "
            f"{(summary['bytes_up'] + summary['bytes_down']) / 1e6:5.2f} MB both ways, "
            f"{summary['bits_per_parameter_up']:4.1f} bits per parameter of the whole model up"
        )


if __name__ == "__main__":
    main()
