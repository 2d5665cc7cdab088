"""Random rotation: after it, every vector looks like independent Gaussian values, which is what quantizers want."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.compose import Read, Write
from laconic.codecs.draws import flip_signs
from laconic.codecs.quantize import sum_of_squares
from laconic.codecs.stream import Sink, Source
from laconic.core import Key

SMALLEST_CHUNK = 1 << 10
_SMALL = 1 << 12


@dataclass(frozen=True)
class Rotate:
    """Random signs, then an orthonormal Hadamard transform of each chunk, scaled to a mean square of 1.

    The chunks are the powers of two that the size is a sum of, so that (nearly) nothing is padded: a remainder below
    1024 is padded to the next power of two. Each chunk's root mean square travels beside it (4 bytes). Without the
    signs, which are fresh for each message, the rotation would be the same for all and no estimate unbiased.
    """

    quantizes: ClassVar[bool] = False

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        """Rotate."""
        sides = chunks(len(values))
        rotated = torch.zeros(sum(sides))
        rotated[: len(values)] = values
        flip_signs(rotated, key)
        parts = torch.split(rotated, sides)
        scales = [sink.write_scale(math.sqrt(sum_of_squares(part) / len(part))) for part in parts]
        for part, scale in zip(parts, scales, strict=True):
            hadamard_(part).div_(scale * math.sqrt(len(part))) if scale else part.zero_()
        if any(scales):
            rest(rotated)

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        """Rotate back."""
        sides = chunks(size)
        scales = [source.read_scale() for _ in sides]
        if not any(scales):
            return torch.zeros(size)
        rotated = rest(sum(sides))
        for part, scale in zip(torch.split(rotated, sides), scales, strict=True):
            hadamard_(part).mul_(scale / math.sqrt(len(part)))
        flip_signs(rotated, key)
        return rotated[:size]


def chunks(size: int) -> list[int]:
    """Powers of two, largest first, that add up to `size` or, after padding the last, to a little more.

    >>> chunks(2_262_602)
    [2097152, 131072, 32768, 1024, 1024]
    >>> chunks(1), chunks(1200)
    ([1], [1024, 256])
    """
    whole, remainder = size & -SMALLEST_CHUNK, size & (SMALLEST_CHUNK - 1)
    sides = [1 << bit for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]
    return [*sides, 1 << (remainder - 1).bit_length()] if remainder else sides


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
