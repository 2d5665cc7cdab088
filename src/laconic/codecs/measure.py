"""What a codec costs and loses on a given vector: the figures that `laconic codecs` prints."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from laconic.codecs.catalogue import eden, lean
from laconic.codecs.feedback import ErrorFeedback
from laconic.core import Codec, Key, Shared, Tree, spec_of

SHOWN = (
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "signsgd",
    "signsgd_mv",
    "terngrad",
    "qsgd:levels=16",
    "qsgd:levels=512",
    "drive",
    "drive_mse",
    "eden:bits=0.5",
    "eden:bits=1",
    "eden:bits=2",
    "eden:bits=3",
    "eden:bits=4",
    "lean:bits=0.25",
    "lean:bits=1",
    "lean:bits=0.25,mode=nearest",
    "lean:bits=1,mode=nearest",
    "topk:fraction=0.01",
    "topk:fraction=0.01 | int8",
    "topk:fraction=0.01 | eden:bits=4",
    "randk:fraction=0.01",
    "threshold:level=1",
)
"""Codecs that make an instructive table."""


class Measurement(NamedTuple):
    """A row of the table."""

    codec: str
    bits_per_value: float
    entropy_bits: float | None
    nmse: float
    encode_values_per_second: float
    decode_values_per_second: float


@runtime_checkable
class _HasEntropy(Protocol):
    def entropy_bits(self, tree: Tree, shared: Shared) -> float: ...


def measure(codec: Codec, values: Tensor | Tree, key: Key, *, repeats: int = 5) -> Measurement:
    """Real bytes, the empirical entropy of the symbols (bits per value), ‖x̂ − x‖²/‖x‖², and the median speeds.

    >>> import torch
    >>> from laconic.codecs import drive
    >>> row = measure(drive(), torch.randn(1 << 17), Key.from_seed(0))
    >>> round(row.bits_per_value, 2), round(row.nmse, 1)
    (1.0, 0.6)
    """
    tree: Tree = {"vector": values} if isinstance(values, Tensor) else values
    spec, shared = spec_of(tree), Shared(key)
    encode, decode = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        blob, _ = codec.encode(tree, shared, {})
        between = time.perf_counter()
        decoded = codec.decode(blob, spec, shared)
        encode.append(between - began)
        decode.append(time.perf_counter() - between)
    inner = codec.codec if isinstance(codec, ErrorFeedback) else codec
    size = sum(leaf.numel() for leaf in tree.values())
    squares, lost = (_squares(part) for part in (tree, {n: decoded[n].double() - tree[n].double() for n in tree}))
    return Measurement(
        codec=codec.text,
        bits_per_value=8 * len(blob) / size,
        entropy_bits=inner.entropy_bits(tree, shared) / size if isinstance(inner, _HasEntropy) else None,
        nmse=lost / squares if squares else 0.0,
        encode_values_per_second=size / statistics.median(encode),
        decode_values_per_second=size / statistics.median(decode),
    )


class RatePoint(NamedTuple):
    """What codecs lose at one rate, the limits for Gaussian values beside them."""

    bits: float
    nearest: float
    nearest_limit: float
    unbiased: float
    eden: float
    unbiased_limit: float


RATES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


def rate_distortion(tree: Tree, key: Key, rates: Sequence[float] = RATES) -> list[RatePoint]:
    """The NMSE of `lean` in both modes and of `eden` at several rates.

    No codec of independent Gaussian values, however long it thinks, has less than 2^(−2R) at R bits a value, or
    1/(2^(2R) − 1) if it is unbiased. A real update is not made of such values: leaves, rows and columns differ, and a
    codec that knows them may be below.

    >>> import torch
    >>> values = torch.randn(100, 100, generator=Key.from_seed(0).torch())
    >>> (point,) = rate_distortion({"w": values}, Key.from_seed(0), [1.0])
    >>> point.nearest_limit < point.nearest < point.eden < point.unbiased
    True
    """
    points = []
    for bits in rates:
        codecs = (lean(bits=bits, mode="nearest"), lean(bits=bits, mode="unbiased"), eden(bits))
        nearest, unbiased, rotated = (measure(codec, tree, key, repeats=1).nmse for codec in codecs)
        points.append(RatePoint(bits, nearest, 4**-bits, unbiased, rotated, 1 / (4**bits - 1)))
    return points


def _squares(tree: Tree) -> float:
    return sum(float(leaf.double().square().sum()) for leaf in tree.values())
