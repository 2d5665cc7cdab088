"""Real updates to develop and measure codecs on: three networks, early and late in training.

`recorded()` trains where nothing is cached yet, which takes some minutes, and keeps the updates in a folder for
temporary files. It wants `LACONIC_DATA`. `python -m benchmarks.updates` records them and says what they are like.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

import laconic as lc
from laconic.core import Key, Reply, Tree, prefixed, subtree
from laconic.core.method import on_messages

FOLDER = Path(tempfile.gettempdir()) / "laconic-updates"


class Recorded(NamedTuple):
    """A client's update, and what both ends knew when it was sent: the weights, and their last change."""

    name: str
    update: Tree
    weights: Tree
    change: Tree


@dataclass(frozen=True)
class Training:
    """A short training, and the rounds of which the first client's update is kept."""

    model: str
    data: str
    cohort: int
    rounds: tuple[int, int]
    lr: float
    batch_size: int


TRAININGS = (
    Training("lenet5_fs", "cifar10", cohort=5, rounds=(3, 20), lr=0.05, batch_size=64),
    Training("resnet20_gn", "cifar10", cohort=3, rounds=(2, 10), lr=0.1, batch_size=50),
    Training("lg_mlp", "mnist", cohort=5, rounds=(3, 20), lr=0.05, batch_size=10),
)


def recorded() -> list[Recorded]:
    """All six updates, from the cache or from training."""
    found = []
    for training in TRAININGS:
        names = [f"{training.model}-{when}" for when in ("early", "late")]
        if not all(_file(name).exists() for name in names):
            _record(training, names)
        for name in names:
            parts = load_file(_file(name))
            found.append(Recorded(name, *(subtree(part, parts) for part in ("update", "weights", "change"))))
    return found


def _file(name: str) -> Path:
    return FOLDER / f"{name}.safetensors"


def _record(training: Training, names: list[str]) -> None:
    before: Tree = {}
    seen: list[int] = []

    def look(replies: Iterable[Reply], key: Key) -> Iterable[Reply]:
        nonlocal before
        for number, reply in enumerate(replies):
            if number == 0:
                now = reply.client.round
                if now in training.rounds and now not in seen:
                    change = {name: reply.received[name] - before[name] for name in reply.received}
                    parts = {"update": reply.message, "weights": reply.received, "change": change}
                    tree = {
                        k: v.contiguous() for part, leaves in parts.items() for k, v in prefixed(part, leaves).items()
                    }
                    FOLDER.mkdir(exist_ok=True)
                    save_file(tree, _file(names[training.rounds.index(now)]))
                    seen.append(now)
                before = {name: leaf.clone() for name, leaf in reply.received.items()}
            yield reply

    federation: Any = getattr(lc.data, training.data)(clients=100)
    solver = lc.Solver(lr=training.lr, local_epochs=1, batch_size=training.batch_size)
    lc.fit(
        method=on_messages(lc.fedavg(solver=solver), server=look),
        data=federation,
        model=training.model,
        rounds=training.rounds[-1],
        cohort=training.cohort,
        eval_every=training.rounds[-1],
        precision="bfloat16",
        workers=0,
    )


def main() -> None:
    for name, update, _, change in recorded():
        leaves = torch.cat([leaf.flatten() for leaf in update.values()]).double()
        known = torch.cat([leaf.flatten() for leaf in change.values()]).double()
        kurtosis = float(leaves.pow(4).mean() / leaves.square().mean() ** 2)
        alike = float(torch.corrcoef(torch.stack([leaves.abs(), known.abs()]))[0, 1])
        print(f"{name:20s} {len(leaves):8,} values, kurtosis {kurtosis:6.1f}, |update| ~ |last change| {alike:.2f}")


if __name__ == "__main__":
    main()
