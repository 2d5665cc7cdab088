"""Clients that have seen two digits each: SCAFFOLD and FedDyn for one model, five more methods for own models."""

import laconic as lc
from laconic.core import read_state


def main(rounds: int = 16) -> None:
    data = lc.data.digits(clients=20, partition={"kind": "label_shards", "shards_per_client": 2})
    solver = lc.Solver(lr=0.1, local_epochs=5)

    def trained(method: lc.Method) -> lc.Run:
        return lc.fit(data=data, method=method, rounds=rounds, cohort=10, eval_every=rounds // 4 or 1, workers=0)

    # Five epochs on two digits lead every client somewhere else, and the mean of these places is a poor one.
    print(f"{'one model for all':20}{'early':>8}{'last':>8}{'MB, both ways':>16}")
    for method in (
        lc.fedavg(solver=solver),
        lc.scaffold(solver=solver),  # control variates: twice the bytes
        lc.feddyn(alpha=0.1, solver=solver),  # linear terms on clients, the bytes of FedAvg
    ):
        run = trained(method)
        figures = [record["global_accuracy"] for record in run.history if "global_accuracy" in record]
        sent = run.summary["bytes_up"] + run.summary["bytes_down"]
        print(f"{method.name:20}{figures[0]:8.3f}{figures[-1]:8.3f}{sent / 1e6:16.2f}")

    # Each client is judged on its own test data, which are those two digits again.
    print(f"\n{'a model for each':20}{'own data':>8}{'server':>8}{'MB, both ways':>16}")
    for method in (
        lc.local_only(start="server", solver=solver),
        lc.fedper(solver=solver),  # the last layer is private, all is trained together
        lc.fedrep(head_epochs=5, solver=solver),  # the private head first, then the shared body
        lc.fedbabu(solver=solver),  # the head is never trained: before it is used, fine-tune (below)
        lc.ditto(lambda_=0.1, solver=solver),  # FedAvg, and own models that are pulled to it
        lc.apfl(solver=solver),  # FedAvg, and mixtures of it with own weights
    ):
        run = trained(method)
        sent = run.summary["bytes_up"] + run.summary["bytes_down"]
        own, common = run.summary["local_accuracy"], run.summary["global_accuracy"]
        print(f"{method.name:20}{own:8.3f}{common:8.3f}{sent / 1e6:16.2f}")
        if method.name == "fedbabu":  # one local update of the whole model for every client
            alone = lc.local_only(start="server", solver=solver)
            tuned = lc.fit(data=data, method=alone, init=read_state(run.model), rounds=1, cohort=20, workers=0)
            print(f"{'  fine-tuned':20}{tuned.summary['local_accuracy']:8.3f}")


if __name__ == "__main__":
    main()
