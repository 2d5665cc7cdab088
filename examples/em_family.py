"""FedAvg, FedProx and FedOpt: the same messages, three ways to use them, on clients that differ much."""

import laconic as lc


def main(rounds: int = 15) -> None:
    # Twenty clients with a few digits each; ten of them train for five epochs in every round.
    data = lc.data.digits(clients=20, partition={"kind": "dirichlet", "alpha": 0.1})
    solver = lc.Solver(lr=0.1, local_epochs=5)
    methods = {
        "fedavg": lc.fedavg(solver=solver),
        "fedprox, mu 0.1": lc.fedprox(mu=0.1, solver=solver),  # clients stay nearer to the server's weights
        "fedopt, momentum": lc.fedopt(
            server=lc.ServerOptimizer("sgd", lr=1.0, options={"momentum": 0.5}), solver=solver
        ),
        "fedopt, Adam": lc.fedopt(server=lc.ServerOptimizer("adam", lr=0.01), solver=solver),
    }
    print(f"{'':18}{'round 5':>9}{'last':>9}{'own data':>10}{'MB up':>8}")
    for name, method in methods.items():
        run = lc.fit(method=method, data=data, rounds=rounds, cohort=10, eval_every=5, workers=0)
        early, summary = run.history[4]["global_accuracy"], run.summary
        print(
            f"{name:18}{early:9.3f}{summary['global_accuracy']:9.3f}"
            f"{summary['local_accuracy']:10.3f}{summary['bytes_up'] / 1e6:8.2f}"
        )


if __name__ == "__main__":
    main()
