"""Sequences and maps: one target per token (or pixel) instead of one per example.

Targets of more than one axis are whole numbers, `IGNORED` where nothing is to be predicted (padding, say). Outputs have
one axis more: the classes, as the last axis (as language models give them), or as the second (as `torch` has it for
images).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The target of a token that does not count."""


class Predictions(NamedTuple):
    """Outputs and targets with one row for everything that was to be predicted."""

    output: Tensor
    target: Tensor


def predictions(output: Tensor, target: Tensor) -> Predictions:
    """A row per token that counts, where there is a target per token; else what was given.

    >>> import torch
    >>> output, target = torch.zeros(2, 3, 5), torch.tensor([[1, 2, IGNORED], [4, IGNORED, IGNORED]])
    >>> [tuple(part.shape) for part in predictions(output, target)]
    [(3, 5), (3,)]
    """
    if not isinstance(output, Tensor) or target.is_floating_point() or target.dim() < 2:
        return Predictions(output, target)
    if output.shape[:-1] != target.shape:
        output = output.movedim(1, -1)
    if output.shape[:-1] != target.shape:
        return Predictions(output, target)
    count = target != IGNORED
    return Predictions(output[count], target[count])


def predicted(target: Tensor) -> Tensor:
    """The targets of all predictions, in the order of `predictions`."""
    return target if target.is_floating_point() or target.dim() < 2 else target[target != IGNORED]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy over the tokens that count; 0 where none does."""
    rows, labels = predictions(output, target)
    return F.cross_entropy(rows, labels, reduction="sum") / max(len(labels), 1)


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean cross-entropy: as if the model chose among so many classes with equal probability."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The cross-entropy of every prediction."""
        return F.cross_entropy(output, target, reduction="none")

    def of_mean(self, mean: float) -> float:
        """What the mean of these values says."""
        return math.exp(min(mean, 700.0))


perplexity = Perplexity()
"""The metric of language models: e to the mean loss of a token."""
