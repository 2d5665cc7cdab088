"""The Laplace prior φ ~ Laplace(w, 1/λ): the server takes the coordinate-wise median.

| symbol | here |
|---|---|
| λ | `penalty` |
| soft(a, t) | sign(a)·max(|a| − t, 0) |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core import Task, Tree, not_negative
from laconic.methods.em import OneCentre, Vote, weighted_mean
from laconic.methods.solvers import Pull


@dataclass(frozen=True)
class Laplace(OneCentre):
    """Client loss NLL + λ‖φ − w‖₁; closed-form M-step w = median_s φ_s = w + median_s Δ_s.

    After every step the client takes the proximal step φ ← w + soft(φ − w, ηλ), so that coordinates become exactly
    equal to the server's; a plain subgradient never does that.
    """

    penalty: float = 1e-4

    def __post_init__(self) -> None:
        not_negative("the penalty of a Laplace prior", self.penalty)

    def pull(self, centre: Tree, task: Task) -> Pull | None:
        """Soft-thresholding of φ − w by ηλ."""
        if self.penalty == 0:
            return None
        anchor = [centre[name].to(task.device) for name in task.trainable]

        def project(weights: list[Tensor], lr: float) -> None:
            for weight, mean in zip(weights, anchor, strict=True):
                shift = torch.nn.functional.softshrink(weight - mean, lr * self.penalty)
                # Where the shift is 0 the sum below gives the server's value exactly.
                torch.add(mean, shift, out=weight.data)

        return Pull(project=project)

    def shift(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """median_s Δ_s. Unlike a mean, a median needs all messages at once."""
        messages = list(votes)
        weights = torch.tensor([vote.weight for vote in messages], dtype=torch.float64)
        return {
            name: median(torch.stack([vote.message[name] for vote in messages]), weights)
            for name in messages[0].message
        }

    def ascent(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """mean_s sign(φ_s − w): λ Σ_s sign(φ_s − w), normalised. Running statistics move to their mean."""
        parameters = set(task.trainable)
        signs = (
            Vote(weight, {n: leaf.sign() if n in parameters else leaf for n, leaf in message.items()})
            for weight, message in votes
        )
        return weighted_mean(signs)


def median(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted median over the first axis; where a whole interval minimises, its midpoint.

    >>> median(torch.tensor([1.0, 4.0, 2.0, 100.0]), torch.ones(4))
    tensor(3.)
    """
    ordered, order = values.sort(dim=0)
    reached = weights[order].cumsum(dim=0)
    half = reached[-1:] / 2
    low = (reached < half).sum(dim=0, keepdim=True)
    high = (reached <= half).sum(dim=0, keepdim=True).clamp(max=len(values) - 1)
    return ((ordered.gather(0, low) + ordered.gather(0, high)) / 2).squeeze(0)
