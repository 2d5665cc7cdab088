"""Variational dropout: four devices, a mini-batch each per round, and gradients that grow sparse with the model."""

from __future__ import annotations

import laconic as lc


def main(rounds: int = 150) -> None:
    """Train on the digits and print what was sent and what is left."""
    method = lc.vardrop(
        first_log_sigma2=-8.0,
        sigma_lr=3.0,
        kl_size="federation",
        kl_start=2.0,
        kl_full=6.0,
        solver=lc.Solver(optimizer="adam", lr=5e-3, local_steps=1, batch_size=64),
    )
    run = lc.fit(
        method=method,
        data=lc.data.digits(clients=4, partition="iid"),
        rounds=rounds,
        cohort=4,
        eval_every=rounds // 5,
        workers=0,
        evaluations=["global"],
    )
    print("round  accuracy  gradients sent  weights left")
    for record in run.history:
        if "global_accuracy" in record:
            print(
                f"{record['round']:5d}  {record['global_accuracy']:8.1%}  {record.clients['gradients_sent']:14.1%}"
                f"  {record['nonzero']:12.1%}"
            )
    for name, share in run.summary.items():
        if name.startswith("nonzero/"):
            print(f"{name.removeprefix('nonzero/')}: {share:.1%} of the weights left")
    print(f"{run.summary['bytes_up'] / 1e6:.2f} MB up, {run.summary['bytes_down'] / 1e6:.2f} MB down")


if __name__ == "__main__":
    main()
