"""The other seam: what a codec is to the rest of laconic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from laconic.core.random import Key
from laconic.core.tree import Spec, Tree, bernoulli_names, exact_names, expectations


@dataclass(frozen=True)
class Shared:
    """What both ends of a link already know: side information that costs nothing.

    `key` is the same at both ends; `received` is the decoded broadcast (empty on the way down); `exact` names the
    floating-point leaves that must come through as they are; `expected` holds the probability of each bit of some
    leaves of bits; `held` is what the receiver of this message already holds, by leaf name, where both ends know it;
    `bernoulli` names the leaves of bits in whose place the sender has probabilities.
    """

    key: Key
    received: Tree = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    expected: Tree = field(default_factory=dict)
    held: Tree = field(default_factory=dict)
    bernoulli: frozenset[str] = frozenset()

    @classmethod
    def of(cls, spec: Spec, key: Key, received: Tree | None = None, *, held: Tree | None = None) -> Shared:
        """What both ends know about a message of a spec."""
        return cls(
            key, received or {}, exact_names(spec), expectations(spec), held=held or {}, bernoulli=bernoulli_names(spec)
        )


@runtime_checkable
class Codec(Protocol):
    """Turns a tree into bytes and back.

    `state` is what the sender remembers between rounds (error feedback), else `{}`. `decode` takes every size
    from `spec`, never from `blob`, and raises `PayloadError` and nothing else on malformed bytes.

    A codec may have more: `traits`, what it does to values (see `Traits`). One that has none is made for changes.
    """

    @property
    def text(self) -> str:
        """The codec as it is written in a configuration."""
        ...

    @property
    def id(self) -> int:
        """Its number on the wire."""
        ...

    def init_state(self, spec: Spec) -> Tree:
        """The sender's first state."""
        ...

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        """The bytes of a tree, and the sender's new state."""
        ...

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        """The tree that the bytes stand for."""
        ...
