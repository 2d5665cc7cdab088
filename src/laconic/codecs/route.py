"""Routing: some leaves by one codec, the others by another."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from laconic.codecs.feedback import ErrorFeedback, with_memory
from laconic.codecs.stream import Sink, Source
from laconic.codecs.vector import floating
from laconic.codecs.wire import CodecId
from laconic.core import (
    Codec,
    ConfigError,
    Leaf,
    Shared,
    Spec,
    Traits,
    Tree,
    bernoulli_names,
    drawn,
    exact_names,
    prefixed,
    spec_of,
    subtree,
    traits_of,
)

_RESERVED = frozenset(",:=|() \t\n")  # what separates patterns and codecs in a text


class _Part(NamedTuple):
    """Leaves that go together, and whether they pass exactly."""

    number: int
    codec: Codec
    names: list[str]
    exact: bool

    @property
    def state(self) -> str:
        """Where the codec's state is kept."""
        return str(self.number)

    def shared(self, shared: Shared) -> Shared:
        """What both ends know, with a key of the codec's own."""
        return replace(shared, key=shared.key.fold_in(self.number))


@dataclass(frozen=True)
class ByLeaf:
    """Codecs with the patterns of the leaves that they code; of several patterns that match a name, the first counts.

    Each codec sees a message of its own: the leaves that pass exactly first, since the lengths of ragged leaves follow
    from them, then the others. The state holds those of the codecs, under `0/`, `1/` …
    """

    routes: tuple[tuple[str, Codec], ...]

    def __post_init__(self) -> None:
        patterns = [pattern for pattern, _ in self.routes]
        if not patterns:
            raise ConfigError("by_leaf needs at least one pattern and its codec.")
        for number, pattern in enumerate(patterns):
            if not pattern or _RESERVED & set(pattern):
                raise ConfigError(
                    f"{self.text}: a pattern is a name with * and ?, without spaces and without any of , : = | ( ), "
                    f"got {pattern!r}."
                )
            if pattern in patterns[:number] or "*" in patterns[:number]:
                earlier = pattern if pattern in patterns[:number] else "*"
                raise ConfigError(f"{self.text}: {pattern!r} is never reached, for {earlier!r} comes before it.")
        if any(isinstance(codec, ErrorFeedback) for _, codec in self.routes):
            bare = ((p, codec.codec if isinstance(codec, ErrorFeedback) else codec) for p, codec in self.routes)
            raise ConfigError(f"{self.text}: error feedback wraps the whole; write ef({ByLeaf(tuple(bare)).text}).")

    @property
    def text(self) -> str:
        """The codec as it is written in a configuration."""
        return f"by_leaf({', '.join(f'{pattern}: {codec.text}' for pattern, codec in self.routes)})"

    @property
    def id(self) -> int:
        """Its number on the wire."""
        return CodecId.BY_LEAF

    @property
    def traits(self) -> Traits:
        """What is true of all of its codecs."""
        return functools.reduce(operator.and_, (traits_of(codec) for _, codec in self.routes))

    def with_memory(self) -> ByLeaf:
        """Each of its codecs where what it loses is sent later."""
        return ByLeaf(tuple((pattern, with_memory(codec)) for pattern, codec in self.routes))

    def init_state(self, spec: Spec) -> Tree:
        """The first states of its codecs; a leaf that no pattern matches is refused here, before anything is sent."""
        state: Tree = {}
        for part in self._parts(spec, exact_names(spec) | bernoulli_names(spec)):
            if not part.exact:
                state |= prefixed(part.state, part.codec.init_state({name: spec[name] for name in part.names}))
        return state

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        """The payloads of its codecs, each after its length."""
        plain = {name for name in tree if not traits_of(self.routes[self._route(name)][1]).draws}
        tree = drawn(tree, shared.bernoulli & plain, shared.key)
        sink, after = Sink(), Tree()
        for part in self._parts(spec_of(tree), shared.exact | shared.bernoulli):
            before = {} if part.exact else subtree(part.state, state)
            blob, new = part.codec.encode({name: tree[name] for name in part.names}, part.shared(shared), before)
            after |= {} if part.exact else prefixed(part.state, new)
            sink.write_uint(len(blob))
            sink.write(blob)
        return sink.getvalue(), after

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        """The leaves that pass exactly, then the others, whose lengths follow."""
        source, decoded = Source(blob), Tree()
        for part in self._parts(spec, shared.exact | shared.bernoulli):
            payload = bytes(source.read(source.read_uint(source.left)))
            leaves = {name: _resolved(spec[name], decoded) for name in part.names}
            decoded |= part.codec.decode(payload, leaves, part.shared(shared))
        source.finish()
        return {name: decoded[name] for name in spec}

    def _parts(self, spec: Spec, exact: frozenset[str]) -> list[_Part]:
        """Neighbours among the leaves that pass exactly, then all others of each codec."""
        values = floating(spec, exact)
        routes = {name: self._route(name) for name in spec}
        first = [name for name in spec if name not in values]
        then = sorted(values, key=routes.__getitem__)
        return [
            _Part(number, self.routes[number][1], list(run), names is first)
            for names in (first, then)
            for number, run in itertools.groupby(names, key=routes.__getitem__)
        ]

    def _route(self, name: str) -> int:
        for number, (pattern, _) in enumerate(self.routes):
            if fnmatchcase(name, pattern):
                return number
        raise ConfigError(
            f"{self.text}: no pattern matches the leaf {name!r}; end with one for all others, "
            f"{self.text.removesuffix(')')}, *: float32)."
        )


def by_leaf(routes: Mapping[str, Codec]) -> ByLeaf:
    """Codecs by the names of leaves: the first pattern (`*`, `?`, `[…]`) that matches a name says which codec codes it.

    >>> from laconic.codecs import eden, int8
    >>> codec = by_leaf({"head.*": int8(), "*": eden(2)})
    >>> codec.text
    'by_leaf(head.*: int8, *: eden:bits=2)'
    """
    return ByLeaf(tuple(routes.items()))


def _resolved(leaf: Leaf, decoded: Tree) -> Leaf:
    """A leaf whose length follows from the leaves before it, whichever codec coded them."""
    if (length := leaf.length) is None:
        return leaf
    return replace(leaf, length=lambda exact: length({**decoded, **exact}))
