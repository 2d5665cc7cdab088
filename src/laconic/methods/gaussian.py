"""The Gaussian prior φ ~ N(w, 1/λ): FedAvg (λ → 0), FedProx (λ > 0), FedOpt (either, with a gradient M-step).

| symbol | here |
|---|---|
| λ | `precision` |
| w, φ_s, Δ_s = φ_s − w | centre, client weights, message |
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
class Gaussian(OneCentre):
    """Client loss NLL + (λ/2)‖φ − w‖²; closed-form M-step w = mean_s φ_s = w + mean_s Δ_s.

    The gradient M-step follows λ Σ_s Δ_s, which is normalised here to mean_s Δ_s: with plain SGD and a learning
    rate of 1 it is the closed form.
    """

    precision: float = 0.0

    def __post_init__(self) -> None:
        not_negative("the precision of a Gaussian prior", self.precision)

    def pull(self, centre: Tree, task: Task) -> Pull | None:
        """∇(λ/2)‖φ − w‖² = λ(φ − w)."""
        if self.precision == 0:
            return None
        anchor = [centre[name].to(task.device) for name in task.trainable]

        def gradient(weights: list[Tensor], gradients: list[Tensor]) -> None:
            torch._foreach_add_(gradients, torch._foreach_sub(weights, anchor), alpha=self.precision)

        return Pull(gradient=gradient)

    def shift(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """mean_s Δ_s."""
        return weighted_mean(votes)

    def ascent(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """mean_s Δ_s as well."""
        return self.shift(centre, votes, task)
