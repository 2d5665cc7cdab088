"""What a codec costs and loses on a given vector: the figures that `laconic codecs` prints."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

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


def measure(codec: Codec, vector: Tensor, key: Key, *, repeats: int = 5) -> Measurement:
    """Real bytes, the empirical entropy of the symbols (bits per value), ‖x̂ − x‖²/‖x‖², and the median speeds.

    >>> import torch
    >>> from laconic.codecs import drive
    >>> row = measure(drive(), torch.randn(1 << 17), Key.from_seed(0))
    >>> round(row.bits_per_value, 2), round(row.nmse, 1)
    (1.0, 0.6)
    """
    tree: Tree = {"vector": vector}
    spec, shared = spec_of(tree), Shared(key)
    encode, decode = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        blob, _ = codec.encode(tree, shared, {})
        between = time.perf_counter()
        decoded = codec.decode(blob, spec, shared)["vector"]
        encode.append(between - began)
        decode.append(time.perf_counter() - between)
    inner = codec.codec if isinstance(codec, ErrorFeedback) else codec
    size, squares = vector.numel(), float(vector.double().square().sum())
    return Measurement(
        codec=codec.text,
        bits_per_value=8 * len(blob) / size,
        entropy_bits=inner.entropy_bits(tree, shared) / size if isinstance(inner, _HasEntropy) else None,
        nmse=float((decoded.double() - vector.double()).square().sum()) / squares if squares else 0.0,
        encode_values_per_second=size / statistics.median(encode),
        decode_values_per_second=size / statistics.median(decode),
    )
