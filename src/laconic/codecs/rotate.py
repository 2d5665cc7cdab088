"""Random rotation: after it, every vector looks like independent Gaussian values, which is what quantizers want."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laconic.codecs.compose import Read, Write
from laconic.codecs.draws import flip_signs, normal, words
from laconic.codecs.quantize import LloydMax
from laconic.codecs.sparsify import kept, largest
from laconic.codecs.stream import Sink, Source, in_range
from laconic.core import ConfigError, Key

SMALLEST_CHUNK = 1 << 10
TINY = 64
"""A remainder of at most so many values gets a uniformly random rotation, which takes the cube of its size."""
TWICE = 1 << 12
"""Chunks of at most so many values are rotated twice: cheap, beside larger ones."""
_SMALL = 1 << 12


@dataclass(frozen=True)
class Rotate:
    """Rotate each chunk at random, keep a fraction of its values, and round these `to` the nearest of a few.

    With z the k kept of a chunk's N rotated values (both ends draw which) and c(z) what they are rounded to, what is
    rotated back is S·c(z), with a scale S for each chunk (4 bytes):

    * `unbiased`: S = N/k·‖z‖²/⟨c(z), z⟩, so that ⟨x̂, x⟩ is ‖x‖² on average (DRIVE and EDEN; Vargaftik et al., 2021 and
      2022). A uniformly random rotation leaves no other direction than that of x: then x̂ is unbiased, whatever x is;
    * else S = ⟨c(z), z⟩/‖c(z)‖², the least squared error.
    """

    to: LloydMax
    fraction: float = 1.0
    unbiased: bool = True
    quantizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"Rotate.fraction must be above 0 and at most 1, got {self.fraction}.")

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        """A scale for each chunk, then the symbols of all."""
        sides = chunks(len(values))
        rotated = torch.zeros(sum(sides))
        rotated[: len(values)] = values
        in_range(max(map(abs, torch.stack(values.aminmax()).tolist())))
        rotate_(rotated, sides, key)
        counts, chosen = self._kept(sides, key)
        rotated = rotated if chosen is None else rotated.masked_select(chosen)
        cells, scales = [], []
        for part, groups, side in zip(
            torch.split(rotated, counts), self.to.groups(counts, key.fold_in("bits")), sides, strict=True
        ):
            symbols, scale = self.to.round(part, groups, unbiased=self.unbiased)
            thinned = side / len(part) if self.unbiased else 1.0
            scales.append(sink.write_scale(scale * thinned / gain(side)))
            cells.append(symbols)
        if any(scales):
            for bits, of_all in zip(self.to.widths, zip(*cells, strict=True), strict=True):
                rest(torch.cat(of_all), 1 << bits)

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        """S·c, rotated back."""
        sides = chunks(size)
        scales = [source.read_scale() for _ in sides]
        if not any(scales):
            return torch.zeros(size)
        counts, chosen = self._kept(sides, key)
        values = self.to.read(counts, key.fold_in("bits"), rest)
        if chosen is not None:
            values = torch.zeros(sum(sides)).masked_scatter_(chosen, values)
        for part, side, scale in zip(torch.split(values, sides), sides, scales, strict=True):
            part.mul_(scale / gain(side))
        rotate_(values, sides, key, back=True)
        return values[:size]

    def _kept(self, sides: list[int], key: Key) -> tuple[list[int], Tensor | None]:
        """How many values of each chunk are kept, and which."""
        if self.fraction == 1:
            return sides, None
        counts = [kept(side, self.fraction) for side in sides]
        drawn = np.split(words(key.fold_in("kept"), sum(sides)), np.cumsum(sides)[:-1])
        parts = [largest(scores, count) for scores, count in zip(drawn, counts, strict=True)]
        return counts, torch.from_numpy(np.concatenate(parts))


def chunks(size: int) -> list[int]:
    """Powers of two, largest first, that add up to `size` or, after padding the last, to a little more.

    A remainder of at most 64 values is a chunk as it is.

    >>> chunks(2_262_602)
    [2097152, 131072, 32768, 1024, 1024]
    >>> chunks(1), chunks(1200), chunks(2085)
    ([1], [1024, 256], [2048, 37])
    """
    whole, remainder = size & -SMALLEST_CHUNK, size & (SMALLEST_CHUNK - 1)
    sides = [1 << bit for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]
    last = remainder if remainder <= TINY else 1 << (remainder - 1).bit_length()
    return [*sides, last] if remainder else sides


def rotate_(values: Tensor, sides: list[int], key: Key, *, back: bool = False) -> None:
    """Rotate each chunk at random, or back again, in place; it becomes `gain` times longer.

    Random signs and a Hadamard transform spread what is concentrated in few values evenly over all. But evenly is not
    yet Gaussian: what lies beside a spike is rounded away. Chunks of at most 4096 values, in which a spike is likely to
    outweigh all others, go through it twice, so that many values with random signs add up to each.

    A tiny chunk has too few signs for either. It is multiplied by a uniformly random orthogonal matrix.
    """
    once, twice = ([side for side in sides if TINY < side <= most] for most in (values.numel(), TWICE))
    tiny = values[sum(once) :]
    steps = [(key, once), (key.fold_in("twice"), twice)]
    for of_step, turned in reversed(steps) if back else steps:
        parts = values[sum(once) - sum(turned) : sum(once)]
        if not back:
            flip_signs(parts, of_step)
        for part in torch.split(parts, turned) if turned else ():
            hadamard_(part)
        if back:
            flip_signs(parts, of_step)
    if len(tiny):
        matrix = uniform_rotation(len(tiny), key.fold_in("tiny"))
        tiny.numpy()[:] = (matrix.T if back else matrix) @ tiny.numpy()


def gain(side: int) -> float:
    """How many times longer a chunk becomes by the transforms, which are not normalised."""
    return 1.0 if side <= TINY else float(side) if side <= TWICE else math.sqrt(side)


def uniform_rotation(side: int, key: Key) -> npt.NDArray[np.float64]:
    """An orthogonal matrix, all equally likely: Gram–Schmidt on the columns of a matrix of normal values."""
    q, r = np.linalg.qr(normal(key, side * side).reshape(side, side))
    return np.asarray(q * np.where(np.diag(r) < 0, -1.0, 1.0))


def hadamard_(values: Tensor) -> Tensor:
    """The Walsh–Hadamard transform (not normalised) of a vector whose size is a power of two, in place.

    H of size 2^(a+b+…) is the Kronecker product of those of size 2^a, 2^b, …: a few small matrix products, which a CPU
    does faster than butterflies. Only sums of at most 64 terms are left to the library, whatever its threads.

    >>> hadamard_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([10., -2., -4.,  0.])
    """
    product = torch.matmul if len(values) > _SMALL else _small_product
    exponent = len(values).bit_length() - 1
    factors = max(1, -(-exponent // 6))
    old, new, stride = values, torch.empty_like(values), 1
    for i in range(factors):
        side = 1 << ((exponent + i) // factors)
        block = (-1, side, stride) if i else (-1, side)
        pair = (_matrix(side), old.view(block)) if i else (old.view(block), _matrix(side))
        product(*pair, out=new.view(block))
        old, new, stride = new, old, stride * side
    return values if old is values else values.copy_(old)


def _small_product(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    # torch wakes its threads for the smallest matrices, which takes a hundred times longer on a busy machine.
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())


@functools.cache
def _matrix(side: int) -> Tensor:
    if side == 1:
        return torch.ones(1, 1)
    half = _matrix(side // 2)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])
