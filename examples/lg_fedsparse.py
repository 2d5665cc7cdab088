"""LG-FedSparse: every device has a head of its own, and what they share is pruned while it is learnt."""

import laconic as lc


def main(rounds: int = 15) -> None:
    # Ten devices that have seen two digits each, on the whole.
    data = lc.data.digits(clients=10, partition={"kind": "label_shards", "shards_per_client": 2})
    solver = lc.Solver(lr=0.1, local_epochs=2)
    methods = {
        "fedavg": lc.fedavg(solver=solver),
        "lg_fedavg, own heads": lc.lg_fedavg(global_layers=1, global_part="first", solver=solver),
        "lg_fedsparse": lc.lg_fedsparse(global_layers=1, global_part="first", lambda0=3e-5, solver=solver),
    }
    print(f"{'':22}{'own data':>9}{'kB up':>8}{'kB down':>9}{'pruned':>8}")
    for name, method in methods.items():
        run = lc.fit(method=method, data=data, rounds=rounds, cohort=10, eval_every=rounds, init="glorot", workers=0)
        summary = run.summary
        print(
            f"{name:22}{summary['local_accuracy']:9.3f}{summary['bytes_up'] / 1e3:8.0f}"
            f"{summary['bytes_down'] / 1e3:9.0f}{summary.get('sparsity', 0.0):8.1%}"
        )


if __name__ == "__main__":
    main()
