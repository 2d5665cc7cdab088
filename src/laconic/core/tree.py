"""`Tree`: a flat dictionary of tensors. Every state, message and statistic is one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laconic.core.errors import PayloadError
from laconic.core.random import Key

Tree = dict[str, Tensor]


@dataclass(frozen=True)
class Leaf:
    """Shape and dtype of one leaf: what a receiver knows before a message arrives.

    A *ragged* leaf is a vector whose length follows from the leaves that are sent exactly (a mask, say): `length`
    computes it from them, `shape` holds the most that it can be. Only the receiver's own functions decide how long a
    leaf is; a message never does.

    An `exact` leaf passes every codec as it is: running statistics and the like, which a sign would ruin. Leaves that
    are not floating-point always do.

    `expected` is for leaves of bits: the probability of each bit to be 1, as far as both ends know. A codec may use it
    to write them in fewer bits; a wrong guess costs bits, never correctness.

    A `bernoulli` leaf is one of bits whose sender gives probabilities, in floating point: bits are drawn on the way
    (`drawn`), by the codec where it can do so in fewer bits, and bits are what the receiver gets.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    length: Callable[[Tree], int] | None = field(default=None, repr=False)
    exact: bool = field(default=False, repr=False, compare=False)
    expected: Tensor | None = field(default=None, repr=False, compare=False)
    bernoulli: bool = field(default=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of values."""
        size = 1
        for side in self.shape:
            size *= side
        return size

    @property
    def num_bytes(self) -> int:
        """Bytes of the values as they lie in memory."""
        return self.size * self.dtype.itemsize


Spec = dict[str, Leaf]


def spec_of(tree: Mapping[str, Tensor]) -> Spec:
    """The specification of a tree.

    >>> spec_of({"w": torch.zeros(2, 3)})
    {'w': Leaf(shape=(2, 3), dtype=torch.float32)}
    """
    return {name: Leaf(tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items()}


def resolve(spec: Mapping[str, Leaf], exact: Tree) -> Spec:
    """The specification with the lengths of ragged leaves filled in from the leaves that came exactly.

    >>> spec = {"mask": Leaf((4,), torch.bool), "kept": Leaf((4,), length=lambda tree: int(tree["mask"].sum()))}
    >>> resolve(spec, {"mask": torch.tensor([True, False, True, False])})["kept"].shape
    (2,)
    """
    resolved: Spec = {}
    for name, leaf in spec.items():
        if leaf.length is None:
            resolved[name] = leaf
            continue
        length = leaf.length(exact)
        if not 0 <= length <= leaf.size:
            raise PayloadError("length", f"leaf {name!r} would have {length} values, but {leaf.size} is the most")
        resolved[name] = replace(leaf, shape=(length,), length=None)
    return resolved


def exact_names(spec: Mapping[str, Leaf]) -> frozenset[str]:
    """The floating-point leaves that pass every codec as they are."""
    return frozenset(name for name, leaf in spec.items() if leaf.exact)


def expectations(spec: Mapping[str, Leaf]) -> Tree:
    """What both ends expect of the leaves of bits, where a spec says it."""
    return {name: leaf.expected for name, leaf in spec.items() if leaf.expected is not None}


def bernoulli_names(spec: Mapping[str, Leaf]) -> frozenset[str]:
    """The leaves of bits whose sender gives probabilities."""
    return frozenset(name for name, leaf in spec.items() if leaf.bernoulli)


def drawn(tree: Mapping[str, Tensor], names: Collection[str], key: Key) -> Tree:
    """The tree with bits in place of the probabilities of some leaves: each is 1 with its probability.

    >>> drawn({"mask": torch.tensor([0.0, 1.0])}, ["mask"], Key.from_seed(0))
    {'mask': tensor([False,  True])}
    """
    random = key.torch()
    bits: Tree = {}
    for name in (name for name in tree if name in names):
        theta = check_probabilities(name, tree[name])
        bits[name] = torch.rand(theta.shape, generator=random) < theta
    return {**tree, **bits}


def check_probabilities(name: str, theta: Tensor) -> Tensor:
    """The probabilities of a leaf, on the CPU; NaN and what lies outside [0, 1] cannot be sent."""
    theta = theta.detach().cpu().float()
    if not bool(((theta >= 0) & (theta <= 1)).all()):
        reason = "range" if bool(theta.isfinite().all()) else "non_finite"
        raise PayloadError(reason, f"{name!r} holds probabilities outside [0, 1] and cannot be sent")
    return theta


def num_values(spec: Mapping[str, Leaf]) -> int:
    """Number of values of all leaves."""
    return sum(leaf.size for leaf in spec.values())


def cut(vector: Tensor, spec: Mapping[str, Leaf]) -> Tree:
    """The leaves of a spec, one after the other, from a vector of their values; they share its memory.

    >>> cut(torch.arange(4), {"a": Leaf((3,)), "b": Leaf((1, 1))})
    {'a': tensor([0, 1, 2]), 'b': tensor([[3]])}
    """
    parts = torch.split(vector, [leaf.size for leaf in spec.values()])
    return {name: part.view(leaf.shape) for (name, leaf), part in zip(spec.items(), parts, strict=True)}


def describe(spec: Mapping[str, Leaf]) -> str:
    """A canonical text of a specification, the same on every machine; fingerprints are made of it.

    >>> describe({"w": Leaf((2, 3)), "b": Leaf((3,))})
    'w:float32[2,3];b:float32[3]'
    """
    return ";".join(
        f"{name}:{str(leaf.dtype).removeprefix('torch.')}"
        f"[{'' if leaf.length is None else '<='}{','.join(map(str, leaf.shape))}]"
        for name, leaf in spec.items()
    )


def map_tree(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply a function leaf by leaf.

    >>> map_tree(torch.add, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    return {name: function(leaf, *(other[name] for other in others)) for name, leaf in tree.items()}


def prefixed(prefix: str, tree: Mapping[str, Tensor]) -> Tree:
    """The tree with `prefix/` before every name, so that several trees live in one.

    >>> list(prefixed("w", {"bias": torch.zeros(1)}))
    ['w/bias']
    """
    return {f"{prefix}/{name}": leaf for name, leaf in tree.items()}


def subtree(prefix: str, tree: Mapping[str, Tensor]) -> Tree:
    """What `prefixed` put in: the leaves under `prefix/`, with the prefix taken off."""
    start = f"{prefix}/"
    return {name[len(start) :]: leaf for name, leaf in tree.items() if name.startswith(start)}


def leaf_bytes(leaf: Tensor) -> bytes:
    """The values of a leaf as they lie in memory, little-endian, row-major."""
    return leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tree_sha256(tree: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and values: equal trees, equal hash, on every machine."""
    digest = hashlib.sha256()
    for name in sorted(tree):
        leaf = tree[name]
        digest.update(describe({name: Leaf(tuple(leaf.shape), leaf.dtype)}).encode() + b"\0")
        digest.update(leaf_bytes(leaf))
    return digest.hexdigest()
