"""Robust means: M-steps in the place of a mean that hostile replies, if they are few enough, cannot carry away.

| symbol | here |
|---|---|
| n, x_s | replies, and what they are: differences Δ_s |
| f | `attackers`: how many of a round's replies may be hostile |
| m, τ | `best`, `radius` |

* **trimmed mean**: in every coordinate, the mean without the f smallest and the f largest; n ≥ 2f + 1
  (Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", 2018).
* **Krum**: the reply with the least sum of squared distances to its n − f − 2 nearest; Multi-Krum is the mean of the m
  best; n ≥ 2f + 3, m ≤ n − f (Blanchard et al., "Machine learning with adversaries", 2017).
* **centred clipping**: v ← v + mean_s (x_s − v) · min(1, τ/‖x_s − v‖), some times, from v = 0; n ≥ 2f + 1
  (Karimireddy et al., "Learning from history for Byzantine robust optimization", 2021, without their momentum; their
  proof wants n ≥ 10f). Without a radius, τ is the median of the distances ‖x_s − v‖.

None takes the client's word for how much it counts: every reply is one vote. All need the whole cohort in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from laconic.core import ALONE, Bound, ConfigError, Population, Task, TooFewReplies, Tree, one_of
from laconic.methods.em import EM, OneCentre, Vote
from laconic.methods.gaussian import Gaussian
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Pull, Solver

Rule = Literal["trimmed_mean", "krum", "centred_clipping"]


@dataclass(frozen=True, kw_only=True)
class Robust(OneCentre):
    """A Gaussian prior whose M-step is a robust mean of the differences, in closed form or for a server's optimizer."""

    rule: Rule = "trimmed_mean"
    attackers: int = 1
    best: int = 1
    radius: float | None = None
    iterations: int = 3
    precision: float = 0.0

    def __post_init__(self) -> None:
        one_of("rule", self.rule, get_args(Rule))
        for name, least in (("attackers", 0), ("best", 1), ("iterations", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"fedrobust: {name} must be at least {least}, got {getattr(self, name)}.")
        if self.radius is not None and not 0 < self.radius < math.inf:
            raise ConfigError(f"fedrobust: radius must be positive and finite, got {self.radius}.")

    @property
    def least(self) -> int:
        """The fewest replies with which the rule stands so many attackers."""
        if self.rule == "krum":
            return max(2 * self.attackers + 3, self.attackers + self.best)
        return 2 * self.attackers + 1

    def pull(self, centre: Tree, task: Task) -> Pull | None:
        """The Gaussian's."""
        return Gaussian(self.precision).pull(centre, task)

    def shift(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """The robust mean of Δ_s."""
        messages = [vote.message for vote in votes]
        if len(messages) < self.least:
            raise TooFewReplies(
                f"{len(messages)} replies, but {self.rule} stands {self.attackers} attackers among {self.least} or more"
            )
        if self.rule == "krum":
            return _mean(krum(messages, self.attackers, self.best))
        if self.rule == "centred_clipping":
            return centred_clipping(messages, self.radius, self.iterations)
        stacked = {name: torch.stack([message[name] for message in messages]) for name in messages[0]}
        return {name: trimmed_mean(values, self.attackers) for name, values in stacked.items()}

    def ascent(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """The same."""
        return self.shift(centre, votes, task)


@dataclass(frozen=True)
class RobustEM:
    """`EM` with a robust prior; a cohort that is too small for its attackers is refused at `bind`."""

    prior: Robust
    solver: Solver
    server: ServerOptimizer | None = None

    link = EM.link

    def bind(self, task: Task, population: Population = ALONE) -> Bound:
        """The method for a task."""
        if population is not ALONE and population.cohort < self.prior.least:
            raise ConfigError(
                f"fedrobust: {self.prior.rule} stands {self.prior.attackers} attackers (best = {self.prior.best}) in a "
                f"cohort of {self.prior.least} or more, got run.cohort = {population.cohort}; "
                "raise it, or lower attackers."
            )
        return EM(self.prior, self.solver, self.server).bind(task, population)


def trimmed_mean(values: Tensor, attackers: int) -> Tensor:
    """The mean over the first axis without so many of the smallest and of the largest, coordinate by coordinate.

    >>> trimmed_mean(torch.tensor([1.0, 2.0, 3.0, 1e9]), 1)
    tensor(2.5000)
    """
    return values.sort(dim=0).values[attackers : len(values) - attackers].mean(dim=0)


def krum(messages: Sequence[Tree], attackers: int, best: int) -> list[Tree]:
    """The `best` messages with the least sum of squared distances to their n − f − 2 nearest, in their order."""
    count = len(messages)
    squares = torch.zeros(count, count, dtype=torch.float64)
    for one in range(count):
        for other in range(one):
            squares[one, other] = squares[other, one] = _distance(messages[one], messages[other]) ** 2
    nearest = squares.sort(dim=1).values[:, 1 : count - attackers - 1]  # the nearest of all is the message itself
    chosen = nearest.sum(dim=1).argsort(stable=True)[:best]
    return [messages[place] for place in sorted(chosen.tolist())]


def centred_clipping(messages: Sequence[Tree], radius: float | None, iterations: int) -> Tree:
    """v after some steps v ← v + mean_s (x_s − v) · min(1, τ/‖x_s − v‖), from 0."""
    centre = {name: torch.zeros_like(leaf) for name, leaf in messages[0].items()}
    for _ in range(iterations):
        distances = [_distance(message, centre) for message in messages]
        reach = sorted(distances)[(len(distances) - 1) // 2] if radius is None else radius
        shares = [min(1.0, reach / distance) if distance else 1.0 for distance in distances]
        moves = (
            {name: (message[name] - leaf) * share for name, leaf in centre.items()}
            for message, share in zip(messages, shares, strict=True)
        )
        mean = _mean(list(moves))
        centre = {name: leaf + mean[name] for name, leaf in centre.items()}
    return centre


def _distance(one: Tree, other: Tree) -> float:
    gaps = (torch.linalg.vector_norm(leaf - other[name], dtype=torch.float64) for name, leaf in one.items())
    return math.sqrt(sum(float(gap) ** 2 for gap in gaps))


def _mean(messages: Sequence[Tree]) -> Tree:
    return {name: torch.stack([message[name] for message in messages]).mean(dim=0) for name in messages[0]}
