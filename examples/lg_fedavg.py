"""LG-FedAvg on the digits: every device keeps its first layer, the second one is learnt together."""

import laconic as lc
from laconic.core import Method


def main(rounds: int = 16) -> None:
    # Ten devices that have seen two digits each, on the whole.
    data = lc.data.digits(clients=10, partition={"kind": "label_shards", "shards_per_client": 2})
    solver = lc.Solver(lr=0.1, local_epochs=2)
    methods: dict[str, Method] = {
        "fedavg": lc.fedavg(solver=solver),
        "local_only": lc.local_only(solver=solver),
        "mtl": lc.mtl(lambda1=1e-3, solver=solver),
        # Half of the rounds on the whole model; then the first layer is each device's own.
        "lg_fedavg": lc.lg_fedavg(global_layers=1, fedavg_rounds=rounds // 2, solver=solver),
        # Any leaves of any model, over any method.
        "own biases": lc.KeepLocal(lc.fedprox(mu=0.01, solver=solver), ("*.bias",)),
    }
    evaluations = ["global", "local", "ensemble"]
    print(f"{'':12}  own data  ensemble  bytes up  parameters shared")
    for name, method in methods.items():
        settings = {"rounds": rounds, "cohort": 10, "eval_every": rounds, "evaluations": evaluations, "workers": 0}
        summary = lc.fit(data=data, method=method, **settings).summary
        own = summary["local_accuracy"]
        shared = int(summary.get("global_parameters", 0 if name == "local_only" else summary["parameters"]))
        print(f"{name:12}  {own:8.3f}  {summary['new_accuracy']:8.3f}  {summary['bytes_up']:8,}  {shared:6,}")


if __name__ == "__main__":
    main()
