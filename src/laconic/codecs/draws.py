"""Draws that both ends can repeat: straight from Philox's raw words, so that they are the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laconic.core import Key


def words(key: Key, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Independent 32-bit numbers."""
    return key.raw(4 * size).view("<u4")[:size]


def uniform(key: Key, size: int) -> Tensor:
    """Independent numbers in [0, 1), multiples of 2^-24: sums and products with them round as on any machine."""
    drawn = words(key, size)
    drawn >>= 8
    return torch.from_numpy(drawn.astype(np.float32)).mul_(2.0**-24)


def bernoulli(key: Key, size: int, probability: float) -> Tensor:
    """Independent bools that are true with a probability below 1."""
    return torch.from_numpy(words(key, size) < np.uint32(probability * 2.0**32))


def normal(key: Key, size: int) -> npt.NDArray[np.float64]:
    """Independent values of N(0, 1), by Box and Muller (1958); machines may differ in their last digits."""
    radius, angle = (words(key, 2 * size).reshape(2, size) + 0.5) * 2.0**-32
    return np.asarray(np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle))


def flip_signs(values: Tensor, key: Key) -> None:
    """Change the sign of each value with probability ½, in place. Doing it twice with one key undoes it."""
    size = len(values)
    bits = np.unpackbits(key.raw(-(-size // 8)), count=size, bitorder="little")
    values.view(torch.int32).bitwise_xor_(torch.from_numpy(bits).to(torch.int32).bitwise_left_shift_(31))
