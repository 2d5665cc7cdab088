"""The Laplace prior φ ~ Laplace(w, 1/λ): the server takes the coordinate-wise median.

| symbol | here |
|---|---|
| λ | `penalty` |
| soft(a, t) | sign(a)·max(|a| − t, 0) |
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core import ClientData, ConfigError, Key, Predictor, Spec, Task, Tree
from laconic.methods.em import Start, Vote, predictor, weighted_mean
from laconic.methods.solvers import Pull


@dataclass(frozen=True)
class Laplace:
    """Client loss NLL + λ‖φ − w‖₁; closed-form M-step w = median_s φ_s = w + median_s Δ_s.

    After every step the client takes the proximal step φ ← w + soft(φ − w, ηλ), so that coordinates become exactly
    equal to the server's; a plain subgradient never does that.
    """

    penalty: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.penalty < math.inf:
            raise ConfigError(f"the penalty of a Laplace prior must be finite and ≥ 0, got {self.penalty}.")

    def init(self, task: Task, key: Key) -> Tree:
        """One set of weights."""
        return task.init(key)

    def spec(self, task: Task) -> Spec:
        """The model's own leaves."""
        return task.spec

    def start(self, centre: Tree, task: Task, data: ClientData, key: Key) -> Start:
        """The median."""
        return Start(centre, {})

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

    def message_spec(self, task: Task) -> Spec:
        """A difference for every leaf that can move."""
        return task.moving

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

    def model(self, centre: Tree, task: Task) -> Predictor:
        """The model at the median."""
        return predictor(task, centre)


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
