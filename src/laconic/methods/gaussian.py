"""The Gaussian prior φ ~ N(w, 1/λ): FedAvg (λ → 0), FedProx (λ > 0), FedOpt (either, with a gradient M-step).

| symbol | here |
|---|---|
| λ | `precision` |
| w, φ_s, Δ_s = φ_s − w | centre, client weights, message |
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
class Gaussian:
    """Client loss NLL + (λ/2)‖φ − w‖²; closed-form M-step w = mean_s φ_s = w + mean_s Δ_s.

    The gradient M-step follows λ Σ_s Δ_s, which is normalised here to mean_s Δ_s: with plain SGD and a learning
    rate of 1 it is the closed form.
    """

    precision: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.precision < math.inf:
            raise ConfigError(f"the precision of a Gaussian prior must be finite and ≥ 0, got {self.precision}.")

    def init(self, task: Task, key: Key) -> Tree:
        """One set of weights."""
        return task.init(key)

    def spec(self, task: Task) -> Spec:
        """The model's own leaves."""
        return task.spec

    def start(self, centre: Tree, task: Task, data: ClientData, key: Key) -> Start:
        """The mean."""
        return Start(centre, {})

    def pull(self, centre: Tree, task: Task) -> Pull | None:
        """∇(λ/2)‖φ − w‖² = λ(φ − w)."""
        if self.precision == 0:
            return None
        anchor = [centre[name].to(task.device) for name in task.trainable]

        def gradient(weights: list[Tensor], gradients: list[Tensor]) -> None:
            torch._foreach_add_(gradients, torch._foreach_sub(weights, anchor), alpha=self.precision)

        return Pull(gradient=gradient)

    def message_spec(self, task: Task) -> Spec:
        """A difference for every leaf that can move."""
        return task.moving

    def shift(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """mean_s Δ_s."""
        return weighted_mean(votes)

    def ascent(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """mean_s Δ_s as well."""
        return self.shift(centre, votes, task)

    def model(self, centre: Tree, task: Task) -> Predictor:
        """The model at the mean."""
        return predictor(task, centre)
