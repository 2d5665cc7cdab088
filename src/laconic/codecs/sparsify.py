"""Sparsifiers: some values travel, the others come back as zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laconic.codecs.compose import Read, Write
from laconic.codecs.draws import words
from laconic.codecs.entropy import Indices, read_indices, write_indices
from laconic.codecs.stream import Sink, Source
from laconic.codecs.vector import saturate
from laconic.core import ConfigError, Key


@dataclass(frozen=True)
class TopK:
    """The values of largest magnitude, a given fraction of all; of equal ones the first. Where they are is coded."""

    fraction: float
    quantizes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_fraction("TopK", self.fraction)

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        """Indices, then values."""
        index = np.flatnonzero(largest(values.abs().numpy(), kept(len(values), self.fraction)))
        write_indices(sink, index, len(values))
        rest(values[torch.from_numpy(index)])

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        """Values at their indices."""
        return scatter(read_indices(source, kept(size, self.fraction), size), size, rest)


@dataclass(frozen=True)
class RandomK:
    """A random fraction of the values, each divided by that fraction: unbiased. Both ends draw the same pattern."""

    fraction: float
    quantizes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_fraction("RandomK", self.fraction)

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        """Values."""
        chosen = values.masked_select(self._pattern(len(values), key))
        rest(saturate(chosen.mul_(len(values) / len(chosen))))

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        """Values where the pattern has them."""
        pattern = self._pattern(size, key)
        return torch.zeros(size).masked_scatter_(pattern, rest(kept(size, self.fraction)))

    def _pattern(self, size: int, key: Key) -> Tensor:
        return torch.from_numpy(largest(words(key, size), kept(size, self.fraction)))


@dataclass(frozen=True)
class Threshold:
    """The values whose magnitude is above `level`; with level 0 nothing is lost. How many and where is coded."""

    level: float = 0.0
    quantizes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.level < math.inf:
            raise ConfigError(f"Threshold.level must be 0 or positive, got {self.level}.")

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        """Count, indices, then values."""
        index = np.flatnonzero(values.abs().numpy() > self.level)
        sink.write_uint(len(index))
        write_indices(sink, index, len(values))
        rest(values[torch.from_numpy(index)])

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        """Values at their indices."""
        return scatter(read_indices(source, source.read_uint(size), size), size, rest)


def kept(size: int, fraction: float) -> int:
    """How many of `size` values are a fraction of them: at least one."""
    return max(1, math.floor(fraction * size + 0.5))


Scores = npt.NDArray[np.float32] | npt.NDArray[np.uint32]


def largest(scores: Scores, count: int) -> npt.NDArray[np.bool_]:
    """Which scores are the largest; of equal scores the first."""
    bar = _bar(scores, count)
    keep: npt.NDArray[np.bool_] = scores >= bar
    if surplus := int(np.count_nonzero(keep)) - count:
        keep[np.flatnonzero(scores == bar)[-surplus:]] = False
    return keep


def _bar(scores: Scores, count: int) -> np.float32 | np.uint32:
    """The smallest of the `count` largest scores. A sample tells about where it is, so that few need to be ordered."""
    sample = np.sort(scores[::64])
    near, margin = round(len(sample) * (1 - count / len(scores))), 3 * math.isqrt(len(sample))
    low, high = sample[max(near - margin, 0)], sample[min(near + margin, len(sample) - 1)]
    above = int(np.count_nonzero(scores > high))
    window = scores[(scores >= low) & (scores <= high)]
    if not 0 < count - above <= len(window):  # the sample misled us
        above, window = 0, scores
    place = len(window) - (count - above)
    bar: np.float32 | np.uint32 = np.partition(window, place)[place]
    return bar


def scatter(index: Indices, size: int, rest: Read) -> Tensor:
    """A vector of zeros with what `rest` gives at some indices."""
    values = torch.zeros(size)
    values[torch.from_numpy(index)] = rest(len(index))
    return values


def _check_fraction(stage: str, fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ConfigError(f"{stage}.fraction must be above 0 and at most 1, got {fraction}.")
