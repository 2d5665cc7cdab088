"""Trees as vectors: all floating-point leaves in one, and the exact leaves beside it.

A codec works on one vector of float32 values, the floating-point leaves in the order of the spec. Leaves of other
types (masks, counts), and those that both ends agree to send exactly, pass losslessly before the vector, also in the
order of the spec: bool as bits, the others as they lie in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.stream import Bytes, Sink, Source
from laconic.core import Leaf, PayloadError, Spec, Tree, cut, leaf_bytes, resolve


def floating(spec: Mapping[str, Leaf], exact: Collection[str] = ()) -> Spec:
    """The leaves that are quantised: floating-point, and not among those that pass exactly."""
    return {name: leaf for name, leaf in spec.items() if leaf.dtype.is_floating_point and name not in exact}


def to_vector(tree: Mapping[str, Tensor]) -> Tensor:
    """Floating-point leaves, one after the other, as one new float32 vector of finite values.

    A float64 value beyond the range of float32 becomes the largest float32. NaN and infinities are refused.

    >>> to_vector({"w": torch.ones(2, 1), "b": torch.zeros(1, dtype=torch.float64)})
    tensor([1., 1., 0.])
    """
    leaves = [leaf.detach().reshape(-1) for leaf in tree.values() if leaf.is_floating_point()]
    if not leaves:
        return torch.zeros(0)
    vector = torch.cat([leaf.to("cpu", torch.float32) for leaf in leaves])
    if not all_finite(vector):
        for name, leaf in tree.items():
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                raise PayloadError("non_finite", f"{name!r} holds NaN or infinite values and cannot be sent")
        saturate(vector)
    return vector


def from_vector(vector: Tensor, spec: Mapping[str, Leaf]) -> Tree:
    """The floating-point leaves of a spec, cut from a vector. Leaves of float32 share its memory."""
    if not all_finite(vector):
        for name, part in cut(vector, floating(spec)).items():
            if not bool(part.isfinite().all()):
                raise PayloadError("non_finite", f"{name!r} would hold NaN or infinite values")
    return {name: part.to(spec[name].dtype) for name, part in cut(vector, floating(spec)).items()}


def all_finite(vector: Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass in the usual case: a sum that is finite has finite terms."""
    return bool(vector.sum(dtype=torch.float32).isfinite()) or bool(vector.isfinite().all())


def saturate(vector: Tensor) -> Tensor:
    """Infinities become the largest value of the type, in place."""
    limit = torch.finfo(vector.dtype).max
    return vector.clamp_(-limit, limit)


def write_exact(tree: Mapping[str, Tensor], sink: Sink, exact: Collection[str] = ()) -> None:
    """The leaves that are not quantised, losslessly."""
    for name, leaf in tree.items():
        if not leaf.is_floating_point() or name in exact:
            _refuse_non_finite(name, leaf)
            packed = leaf.dtype == torch.bool
            sink.write(
                np.packbits(leaf.detach().cpu().numpy(), bitorder="little").tobytes() if packed else leaf_bytes(leaf)
            )


def read_exact(source: Source, spec: Mapping[str, Leaf], exact: Collection[str] = ()) -> Tree:
    """What `write_exact` wrote."""
    quantised = floating(spec, exact)
    tree: Tree = {}
    for name, leaf in spec.items():
        if name not in quantised:
            # The length of a ragged one follows from those before it.
            tree[name] = _exact(source, leaf if leaf.length is None else resolve({name: leaf}, tree)[name])
    for name, values in tree.items():
        _refuse_non_finite(name, values)
    return tree


def _refuse_non_finite(name: str, leaf: Tensor) -> None:
    if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
        raise PayloadError("non_finite", f"{name!r} holds NaN or infinite values")


def unpack_bits(packed: Bytes, size: int) -> Bytes:
    """`size` bits, least significant first; the spare bits of the last byte must be 0."""
    if size % 8 and packed[-1] >> (size % 8):
        raise PayloadError("padding", "the spare bits after the last symbol must be 0")
    return np.unpackbits(packed, count=size, bitorder="little")


def _exact_bytes(leaf: Leaf) -> int:
    return -(-leaf.size // 8) if leaf.dtype == torch.bool else leaf.num_bytes


def _exact(source: Source, leaf: Leaf) -> Tensor:
    if not leaf.size:
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    raw = source.array(_exact_bytes(leaf))
    if leaf.dtype == torch.bool:
        return torch.from_numpy(unpack_bits(raw, leaf.size)).view(torch.bool).reshape(leaf.shape)
    if not leaf.size:
        return torch.zeros(leaf.shape, dtype=leaf.dtype)  # nothing cannot be viewed as another type
    return torch.from_numpy(raw.copy()).view(leaf.dtype).reshape(leaf.shape)
