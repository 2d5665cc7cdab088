"""A model, a loss, a metric and data of one's own, with compressed messages both ways."""

import numpy as np
import torch
from torch import nn

import laconic as lc


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def smoothed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.05)


def top2(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric gives one figure per example."""
    return (output.topk(2, dim=1).indices == target[:, None]).any(dim=1).float()


def main(rounds: int = 20) -> None:
    rng = np.random.default_rng(0)
    clients = []
    for shift in rng.normal(scale=0.5, size=(20, 12)):  # every client sees the world a little differently
        x = rng.normal(size=(80, 12)) + shift
        clients.append((x, x[:, :3].argmax(axis=1)))
    run = lc.fit(
        data=lc.Federation.from_clients(clients),
        model=Net,
        loss=smoothed,
        metrics={"accuracy": lc.accuracy, "top2": top2},
        method=lc.fedavg(solver=lc.Solver(lr=0.1, local_epochs=3)),
        rounds=rounds,
        cohort=10,
        up="eden:bits=2",
        down="eden:bits=4",
    )
    summary = run.summary
    print(f"accuracy {summary['global_accuracy']:.3f}, top-2 {summary['global_top2']:.3f}")
    print(f"{summary['bits_per_parameter_up']:.2f} bits up, {summary['bits_per_parameter_down']:.2f} down")
    print(run.model(torch.zeros(1, 12)))


if __name__ == "__main__":
    main()
