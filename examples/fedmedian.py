"""FedMedian: three of ten clients send rubbish. The mean follows them, the median and the trimmed mean do not."""

import laconic as lc
from laconic.testing import Byzantine, scaled


def main(rounds: int = 10) -> None:
    data = lc.data.digits(clients=10)
    solver = lc.Solver(lr=0.2, local_epochs=3)
    print(f"{'':12}{'all honest':>12}{'three lie':>12}")
    robust = lc.fedrobust(rule="trimmed_mean", attackers=3, solver=solver)
    for method in (lc.fedavg(solver=solver), lc.fedmedian(penalty=1e-4, solver=solver), robust):
        # What three clients send is minus ten times what they have learnt: well-formed, finite and wrong.
        attacked = Byzantine(method, clients={1, 4, 7}, transform=scaled(-10))
        # Runs have a bound on the norm of a reply by default, which is off here: methods stand by themselves.
        how = {"rounds": rounds, "cohort": 10, "eval_every": rounds, "workers": 0, "max_norm": "off"}
        honest, lied = (lc.fit(method=used, data=data, **how).summary for used in (method, attacked))
        print(f"{method.name:12}{honest['global_accuracy']:12.3f}{lied['global_accuracy']:12.3f}")

    # Messages that are not even finite are refused one by one, whatever the method.
    broken = Byzantine(lc.fedavg(solver=solver), clients={1}, transform=scaled(float("inf")))
    run = lc.fit(method=broken, data=data, rounds=1, cohort=10, workers=0)
    print("refused:", run.history[0]["rejections"])


if __name__ == "__main__":
    main()
