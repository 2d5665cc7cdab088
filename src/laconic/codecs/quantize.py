"""Quantizers: from values to symbols of a small alphabet, and the scale that brings them back.

Scales are sums over many values. They are taken in double precision and in numpy, whose order of summation does not
depend on the number of threads.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laconic.codecs.compose import Read, Write
from laconic.codecs.draws import bernoulli, uniform
from laconic.codecs.stream import SMALLEST, Sink, Source
from laconic.core import ConfigError, Key, PayloadError

_BLOCK = 1 << 15  # values at a time, so that they stay in the cache while they are looked at many times


def sum_of(values: Tensor) -> float:
    """The sum, in double precision."""
    return float(values.numpy().sum(dtype=np.float64))


def sum_of_squares(values: Tensor) -> float:
    """The squared Euclidean norm, in double precision."""
    return float(np.einsum("i,i->", values.numpy(), values.numpy(), dtype=np.float64))


def look_up(table: Tensor, symbols: Tensor) -> Tensor:
    """The table's entry for each symbol."""
    values = torch.empty(len(symbols), dtype=table.dtype)
    for block, of in zip(torch.split(values, _BLOCK), torch.split(symbols, _BLOCK), strict=True):
        np.take(table.numpy(), of.numpy(), out=block.numpy(), mode="clip")
    return values


@dataclass(frozen=True)
class Sign:
    """One bit a value; 0 counts as positive. Decodes to ±S with

    * `mean`: S = ‖x‖₁/d, the least squared error (Seide et al., 2014),
    * `unit`: S = `step`, which both ends know: SignSGD as published (Bernstein et al., 2018) has a step of 1.
    """

    scale: Literal["mean", "unit"] = "mean"
    step: float = 1.0
    quantizes: ClassVar[bool] = True

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        """Signs, and the scale; nothing but a zero scale for a zero vector."""
        total = sum_of(values.abs())
        scale = self.step if self.scale == "unit" and total else total / len(values)
        if sink.write_scale(scale):
            rest((values < 0).view(torch.uint8), 2)

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        """±S."""
        scale = source.read_scale()
        if self.scale == "unit" and scale not in (0.0, float(np.float32(self.step))):
            raise PayloadError(
                "scale", f"a scale of {scale:.3g}, but these signs have {self.step:.3g} (or 0, for no signal)"
            )
        if not scale:
            return torch.zeros(size)
        return rest(size, 2).to(torch.float32).mul_(-2 * scale).add_(scale)


@dataclass(frozen=True)
class Levels:
    """Evenly spaced levels with stochastic rounding: unbiased, whatever the values.

    x becomes n·l/s with an integer l in [−s, s], one of the two nearest to s·x/n, so that its mean is s·x/n.

    * QSGD (Alistarh et al., 2017): n = ‖x‖₂;
    * uniform (int8: s = 127): n = max |x|;
    * TernGrad (Wen et al., 2017): s = 1, n = max |x| after clipping at `clip` standard deviations.
    """

    levels: int
    norm: Literal["l2", "max"] = "max"
    clip: float = 0.0
    quantizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 32767:
            raise ConfigError(f"Levels.levels must be between 1 and 32767, got {self.levels}.")
        if not 0 <= self.clip < math.inf:
            raise ConfigError(f"Levels.clip must be 0 (off) or a positive number of deviations, got {self.clip}.")

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        """Norm, largest level in use, levels."""
        if self.clip:
            mean = sum_of(values) / len(values)
            limit = self.clip * math.sqrt(sum_of_squares(values - mean) / len(values))
            # A constant vector has no deviation, and clipping it to nothing would lose it.
            values = values.clamp(-limit, limit) if limit else values
        norm = math.sqrt(sum_of_squares(values)) if self.norm == "l2" else float(values.abs().max())
        scale = sink.write_scale(norm)
        if not scale:
            return
        levels = uniform(key, len(values)).add_(values * (self.levels / scale)).floor_()
        levels.clamp_(-self.levels, self.levels)  # the norm was rounded to float32, so the largest value may exceed it
        largest = int(levels.abs().max())
        sink.write_uint(largest)
        if largest:
            alphabet = 2 * largest + 1
            rest(levels.add_(largest).to(torch.uint8 if alphabet <= 256 else torch.int32), alphabet)

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        """n·l/s."""
        scale = source.read_scale()
        largest = source.read_uint(self.levels) if scale else 0
        if not largest:
            return torch.zeros(size)
        return rest(size, 2 * largest + 1).to(torch.float32).sub_(largest).mul_(scale / self.levels)


Groups = list[tuple[int, Tensor | None]]
"""The values that have so many bits each: a mask, or None for all."""


@dataclass(frozen=True)
class LloydMax:
    """The 2^bits values that are best for Gaussian input: EDEN's levels (Vargaftik et al., 2022).

    Where `bits` is not whole, a pattern that both ends draw gives some values one bit more than the others.
    """

    bits: float

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"LloydMax.bits must be between 1 and 8, got {self.bits}.")

    @property
    def widths(self) -> list[int]:
        """The whole numbers of bits that values may have."""
        return sorted({math.floor(self.bits), math.ceil(self.bits)})

    def groups(self, sizes: list[int], key: Key) -> list[Groups]:
        """Which values have how many bits, in each of several vectors."""
        if len(self.widths) == 1:
            return [[(self.widths[0], None)] for _ in sizes]
        more = torch.split(bernoulli(key, sum(sizes), self.bits % 1), sizes)
        return [[(self.widths[0], ~mask), (self.widths[1], mask)] for mask in more]

    def round(self, values: Tensor, groups: Groups, *, unbiased: bool) -> tuple[list[Tensor], float]:
        """The cells of z/rms(z), group by group, and the scale for their values c.

        The scale S is the one for which ⟨S·c, z⟩ = ‖z‖² (`unbiased`), or for which S·c is closest to z.
        """
        squares = sum_of_squares(values)
        deviation = math.sqrt(squares / len(values))
        cells, product, length = [], 0.0, 0.0
        for bits, group in groups:
            part = values if group is None else values.masked_select(group)
            cells.append(cell_of(part, bits, deviation if deviation >= SMALLEST else 1.0))
            if bits == 1:
                product += half_centroids(1)[0] * sum_of(part.abs())
                length += half_centroids(1)[0] ** 2 * len(part)
            else:
                nearest = look_up(_centroids(bits), cells[-1])
                length += 0.0 if unbiased else sum_of_squares(nearest)
                product += sum_of(nearest.mul_(part))
        if deviation < SMALLEST:
            return cells, 0.0
        return cells, squares / product if unbiased else product / length

    def read(self, sizes: list[int], key: Key, rest: Read) -> Tensor:
        """The values c of several vectors, one after the other."""
        if len(self.widths) == 1:
            return look_up(_centroids(self.widths[0]), rest(sum(sizes), 1 << self.widths[0]))
        more = bernoulli(key, sum(sizes), self.bits % 1)
        values = torch.zeros(sum(sizes))
        for bits, group in zip(self.widths, (~more, more), strict=True):
            symbols = rest(int(torch.count_nonzero(group)), 1 << bits)
            values.masked_scatter_(group, look_up(_centroids(bits), symbols))
        return values


def cell_of(values: Tensor, bits: int, deviation: float) -> Tensor:
    """The index of the nearest centroid, from the most negative to the most positive."""
    half = 1 << (bits - 1)
    if bits == 1:
        return (values >= 0).view(torch.uint8)
    boundaries, start, steps_per_unit = _cells(bits)
    boundaries = boundaries * np.float32(deviation)
    cells = torch.empty(len(values), dtype=torch.uint8)
    for block, into in zip(torch.split(values, _BLOCK), torch.split(cells, _BLOCK), strict=True):
        magnitude = block.abs().numpy()
        step = np.minimum(magnitude * np.float32(steps_per_unit / deviation), len(start) - 1).astype(np.intp)
        cell = np.take(start, step)
        cell += magnitude > np.take(boundaries, cell)
        cell ^= -(block < 0).numpy().view(np.uint8)  # of a negative value −1 − cell, modulo 256
        np.add(cell, np.uint8(half), out=into.numpy())
    return cells


@functools.cache
def _cells(bits: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8], float]:
    """Boundaries between the positive cells, and for each of many equal steps the cell in which it begins.

    Steps are so small that at most one boundary lies in a step and half a step around it: one comparison is enough.
    """
    boundaries = np.array([(a + b) / 2 for a, b in itertools.pairwise(half_centroids(bits))])
    steps_per_unit = 4 / min(np.diff(boundaries, prepend=0.0))
    edges = (np.arange(math.ceil(boundaries[-1] * steps_per_unit) + 2) - 0.5) / steps_per_unit
    start = np.searchsorted(boundaries, edges).astype(np.uint8)
    return np.append(boundaries, np.inf).astype(np.float32), start, steps_per_unit


@functools.cache
def half_centroids(bits: int) -> tuple[float, ...]:
    """The positive half of the 2^bits values that are best for N(0, 1): the fixed point c_i = E[X | cell i].

    Lloyd's iteration c ← E[X | cell(c)] would need 10⁵ steps for 8 bits; Newton's method on the same equation needs a
    few, starting from the density of levels that is best in the limit (Panter and Dite, 1951).

    >>> [round(c, 4) for c in half_centroids(2)]
    [0.4528, 1.5104]
    """
    count = 1 << (bits - 1)
    quantiles = 0.5 + (torch.arange(count, dtype=torch.float64) + 0.5) / (2 * count)
    centroids = math.sqrt(3) * torch.special.ndtri(quantiles)
    for _ in range(50):
        residual, slope = _lloyd_residual(centroids)
        step = torch.linalg.solve(slope, residual)
        centroids = centroids - step
        if float(step.abs().max()) < 1e-13:
            break
    return tuple(centroids.tolist())


def _lloyd_residual(centroids: Tensor) -> tuple[Tensor, Tensor]:
    """c − E[X | cell(c)] and its derivative, for the cells between 0, the midpoints and infinity."""
    middle = (centroids[1:] + centroids[:-1]) / 2
    low = torch.cat([torch.zeros(1, dtype=torch.float64), middle])
    high = torch.cat([middle, torch.full((1,), torch.inf, dtype=torch.float64)])
    density_low, density_high = (torch.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) for edge in (low, high))
    mass = torch.special.ndtr(-low) - torch.special.ndtr(-high)
    mean = (density_low - density_high) / mass
    by_low = density_low * (mean - low) / mass / 2
    by_high = torch.where(high.isinf(), 0.0, density_high * (high.nan_to_num() - mean) / mass / 2)
    by_low[0] = 0.0
    slope = torch.diag(1 - by_low - by_high) - torch.diag(by_low[1:], -1) - torch.diag(by_high[:-1], 1)
    return centroids - mean, slope


@functools.cache
def _centroids(bits: int) -> Tensor:
    half = torch.tensor(half_centroids(bits), dtype=torch.float64)
    return torch.cat([-half.flip(0), half]).to(torch.float32)
