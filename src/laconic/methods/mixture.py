"""A mixture of K Gaussians φ ~ (1/K) Σ_k N(w_k, 1/λ): the server learns an ensemble.

| symbol | here |
|---|---|
| K | `members` |
| λ | `precision` (divided by the number of parameters where `normalized`) |
| r_sk = softmax_k(−λ/2 ‖φ_s − w_k‖²) | responsibilities |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laconic.core import (
    ClientData,
    ConfigError,
    Key,
    Leaf,
    Predictor,
    Spec,
    Task,
    Tree,
    not_negative,
    num_values,
    one_of,
    prefixed,
    subtree,
)
from laconic.methods.em import Origin, Vote, predictor
from laconic.methods.solvers import Pull
from laconic.models.ensemble import Ensemble

_MEMBER = "#member"  # the leaf of a message that says which centre the difference is from


@dataclass(frozen=True)
class Mixture:
    """Client loss NLL − log Σ_k exp(−λ/2‖φ − w_k‖²); closed-form M-step w_k = Σ_s r_sk φ_s / Σ_s r_sk.

    The centres start apart (a key each), or they would stay together for ever. A client starts from one of them: a
    `random` one, drawn anew in every round, or the one that fits its data `best`. Squared distances are sums over
    all parameters (running statistics are none), so responsibilities are all but one-hot unless λ is tiny or
    `normalized` divides them.
    """

    members: int = 3
    precision: float = 0.1
    normalized: bool = False
    start_from: Literal["random", "best"] = "random"

    def __post_init__(self) -> None:
        if not 1 <= self.members <= 255:
            raise ConfigError(f"members must lie between 1 and 255, got {self.members}.")
        not_negative("the precision of a mixture", self.precision)
        one_of("start_from", self.start_from, ("random", "best"))

    def init(self, task: Task, key: Key) -> Tree:
        """K sets of weights from K keys."""
        centre: Tree = {}
        for k in range(self.members):
            centre.update(prefixed(str(k), task.init(key if k == 0 else key.fold_in("member", k))))
        return centre

    def spec(self, task: Task) -> Spec:
        """K copies of the model's leaves."""
        return {f"{k}/{name}": leaf for k in range(self.members) for name, leaf in task.spec.items()}

    def start(self, centre: Tree, task: Task, data: ClientData, key: Key) -> Origin:
        """One of the centres."""
        if self.start_from == "best" and len(data.train):
            losses = [self._loss(subtree(str(k), centre), task, data) for k in range(self.members)]
            member = losses.index(min(losses))
        else:
            member = int(key.fold_in("member").numpy().integers(self.members))
        note = {_MEMBER: torch.tensor([member], dtype=torch.uint8)}
        return Origin(subtree(str(member), centre), note)

    def pull(self, centre: Tree, task: Task) -> Pull | None:
        """∇ −log Σ_k exp(−λ/2‖φ − w_k‖²) = λ Σ_k r_k (φ − w_k)."""
        precision = self._precision(task)
        if precision == 0:
            return None
        anchors = [[centre[f"{k}/{name}"].to(task.device) for name in task.trainable] for k in range(self.members)]

        def gradient(weights: list[Tensor], gradients: list[Tensor]) -> None:
            gaps = [torch._foreach_sub(weights, anchor) for anchor in anchors]
            shares = responsibilities([squared_norm(gap) for gap in gaps], precision)
            for share, gap in zip(shares.tolist(), gaps, strict=True):
                if share:
                    torch._foreach_add_(gradients, gap, alpha=precision * share)

        return Pull(gradient=gradient)

    def message_spec(self, task: Task) -> Spec:
        """A difference for every leaf that can move, and a byte for the centre that it is from (modulo K)."""
        return {**task.moving, _MEMBER: Leaf((1,), torch.uint8)}

    def shift(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """Σ_s r_sk (φ_s − w_k) / Σ_s r_sk; a centre that nobody answers for stays."""
        total, mass = self._pull_of(centre, votes, task)
        for k, weight in enumerate(mass):
            for leaf in subtree(str(k), total).values():
                leaf.div_(weight or 1.0)
        return total

    def ascent(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """Σ_s r_sk (φ_s − w_k) / S: λ Σ_s r_sk (φ_s − w_k), normalised."""
        total, mass = self._pull_of(centre, votes, task)
        return {name: leaf / sum(mass) for name, leaf in total.items()}

    def model(self, centre: Tree, task: Task) -> Predictor:
        """The ensemble."""
        return Ensemble(
            [predictor(task, subtree(str(k), centre)) for k in range(self.members)],
            probabilities=task.outputs == "logits",
        ).eval()

    def _pull_of(self, centre: Tree, votes: Iterable[Vote], task: Task) -> tuple[Tree, list[float]]:
        """Σ_s r_sk (φ_s − w_k) for every leaf of every centre, and Σ_s r_sk."""
        parameters = set(task.trainable)
        leaves = sorted(task.moving, key=lambda name: name not in parameters)  # parameters first, for the distances
        precision = self._precision(task)
        total = {name: torch.zeros_like(leaf) for name, leaf in centre.items()}
        mass = [0.0] * self.members
        for vote in votes:
            member = int(vote.message[_MEMBER]) % self.members
            weights = [vote.message[name] + centre[f"{member}/{name}"] for name in leaves]
            gaps = [
                # The difference from its own centre is the message itself, free of rounding.
                [vote.message[name] for name in leaves]
                if k == member
                else torch._foreach_sub(weights, [centre[f"{k}/{name}"] for name in leaves])
                for k in range(self.members)
            ]
            shares = responsibilities([squared_norm(gap[: len(parameters)]) for gap in gaps], precision)
            for k, (share, gap) in enumerate(zip(shares.tolist(), gaps, strict=True)):
                torch._foreach_add_([total[f"{k}/{n}"] for n in leaves], gap, alpha=vote.weight * share)
                mass[k] += vote.weight * share
        return total, mass

    def _precision(self, task: Task) -> float:
        parameters = {name: task.spec[name] for name in task.trainable}
        return self.precision / num_values(parameters) if self.normalized else self.precision

    @staticmethod
    def _loss(weights: Tree, task: Task, data: ClientData) -> float:
        module = task.load(weights).eval()
        x, y = data.train.tensors()
        with torch.no_grad():
            return float(task.loss(task.forward(module, x.to(task.device)), y.to(task.device)))


def squared_norm(leaves: Sequence[Tensor]) -> Tensor:
    """‖·‖² over all leaves, as a float64 scalar."""
    return torch.stack([norm.double() for norm in torch._foreach_norm(list(leaves))]).square().sum()


def responsibilities(squared_distances: list[Tensor], precision: float) -> Tensor:
    """softmax_k(−λ/2 · distance²_k), by the log-sum-exp trick.

    >>> responsibilities([torch.tensor(0.0), torch.tensor(1e9)], 1.0)
    tensor([1., 0.])
    """
    return torch.softmax(-0.5 * precision * torch.stack(squared_distances), dim=0)
