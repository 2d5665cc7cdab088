"""A codec is stages and a coder.

A **stage** turns a vector into another one, or into symbols, and writes what its inverse needs besides; a **coder**
turns floating-point values or symbols into bytes, exactly. A stage hands its result on by calling `rest`, and gets it
back by calling `rest`, so that both halves of a stage stand next to each other and read alike::

    @dataclass(frozen=True)
    class Halve:
        "Send every second value; the others come back as zero."
        quantizes = False

        def encode(self, values, key, sink, rest):
            rest(values[::2])

        def decode(self, source, size, key, rest):
            values = torch.zeros(size)
            values[::2] = rest((size + 1) // 2)
            return values

    halve = Pipeline((Halve(),), Floats("float16"), text="halve", id=CodecId.CUSTOM)

Such a codec goes wherever one of the catalogue goes, `halve | eden(2)` too; `laconic.testing.check_codec` examines it.

A stage sees a vector. One that wants to know the shape of the leaf that it was has a function `shaped`: see `Shaped`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.codecs.masks import BitCoder, Plain
from laconic.codecs.stream import Sink, Source
from laconic.codecs.vector import floating, from_vector, to_vector
from laconic.codecs.wire import CodecId
from laconic.core import ConfigError, Key, Shared, Spec, Traits, Tree, num_values, resolve, spec_of

_PLAIN = Plain()
_CHANGES = Traits()


class Write(Protocol):
    """The rest of a pipeline, writing."""

    def __call__(self, values: Tensor, alphabet: int = 0) -> None:
        """Write values, or symbols in [0, alphabet)."""
        ...


class Read(Protocol):
    """The rest of a pipeline, reading."""

    def __call__(self, size: int, alphabet: int = 0) -> Tensor:
        """Read `size` values, or as many symbols in [0, alphabet)."""
        ...


class Stage(Protocol):
    """One step from values to bytes, and back. A frozen dataclass; all randomness comes from `key`.

    What only the sender draws (stochastic rounding) may come from `key.torch()`; what both ends draw (a rotation, a
    pattern) comes from `key.numpy()`. `decode` knows the size from the spec; what it reads from `source` it checks.
    A stage may call `rest` several times, or not at all; what follows has another key each time.
    """

    @property
    def quantizes(self) -> bool:
        """Whether it hands on symbols, so that no other stage can follow."""
        ...

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        """Write side information to `sink` and hand the new values or symbols to `rest`."""
        ...

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        """Read side information, get values or symbols from `rest`, and give `size` float32 values back."""
        ...


@runtime_checkable
class Shaped(Protocol):
    """A stage that sees shapes. Its codec works leaf by leaf, and it comes first: after another stage, shapes are lost.

    Values are still handed to it as a vector, row by row::

        @dataclass(frozen=True)
        class RowMeans:
            "The mean of every row of a matrix; all else as it is."
            rows: int = 0
            quantizes = False

            def shaped(self, shape):
                return RowMeans(rows=shape[0]) if len(shape) > 1 else None

            def encode(self, values, key, sink, rest):
                rest(values.view(self.rows, -1).mean(dim=1))

            def decode(self, source, size, key, rest):
                return rest(self.rows).repeat_interleave(size // self.rows)
    """

    def shaped(self, shape: tuple[int, ...]) -> Stage | None:
        """The stage for a leaf of this shape. A ragged leaf is a vector.

        None where it leaves such leaves alone, and hands them on as they are: a stage that quantizes cannot.
        """
        ...


class Coder(Protocol):
    """An exact code: what `encode` wrote, `decode` reads, bit for bit."""

    def encode(self, values: Tensor, alphabet: int, sink: Sink) -> None:
        """Write symbols in [0, alphabet), or floating-point values where `alphabet` is 0."""
        ...

    def decode(self, source: Source, size: int, alphabet: int) -> Tensor:
        """Read `size` of them; `PayloadError` on anything that `encode` does not write."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """Stages, then a coder, on all floating-point leaves as one vector, or on each by itself (`per_leaf`).

    Leaves of other types pass losslessly, and first: the lengths of ragged leaves follow from them. `bits` says how
    they are written. The state is empty: wrap it in `ef` for error feedback.

    >>> import torch
    >>> from laconic.codecs import topk, eden
    >>> codec = topk(0.1) | eden(4)
    >>> tree, shared = {"w": torch.randn(100, 10)}, Shared(Key.from_seed(0))
    >>> blob, _ = codec.encode(tree, shared, {})
    >>> decoded = codec.decode(blob, spec_of(tree), shared)
    >>> int((decoded["w"] != 0).sum()), len(blob) < 200
    (100, True)
    """

    stages: tuple[Stage, ...]
    coder: Coder
    text: str
    id: int
    per_leaf: bool = False
    bits: BitCoder = _PLAIN
    traits: Traits = _CHANGES
    """What it does to values; unless it says otherwise, it is made for changes."""

    def __post_init__(self) -> None:
        if any(stage.quantizes for stage in self.stages[:-1]):
            raise ConfigError(f"{self.text}: nothing can follow a stage that quantizes.")
        if any(isinstance(stage, Shaped) for stage in self.stages[1:]):
            raise ConfigError(f"{self.text}: a stage that sees shapes must come first, for others leave none.")
        if any(isinstance(stage, Shaped) for stage in self.stages) and not self.per_leaf:
            raise ConfigError(f"{self.text}: a stage that sees shapes works leaf by leaf; set per_leaf=True.")

    def __or__(self, then: Pipeline) -> Pipeline:
        """This codec's stages, then those of another, and its coder; one of the two may say how bits are written."""
        if not isinstance(then, Pipeline):
            raise ConfigError(f"{self.text} | {then.text}: ef and by_leaf go around a chain; write ef(a | b).")
        codes_bits = self.bits != _PLAIN
        if not (self.stages or codes_bits) or any(stage.quantizes for stage in self.stages[-1:]):
            raise ConfigError(f"{self.text} | {then.text}: {self.text} ends in bytes, nothing can follow it.")
        if codes_bits and then.bits != _PLAIN:
            raise ConfigError(f"{self.text} | {then.text}: bits are coded once; leave one of the two out.")
        return replace(
            self,
            stages=self.stages + then.stages,
            coder=then.coder,
            text=f"{self.text} | {then.text}",
            id=CodecId.CHAIN,
            per_leaf=self.per_leaf or then.per_leaf,
            bits=self.bits if codes_bits else then.bits,
            traits=self.traits & then.traits,
        )

    def init_state(self, spec: Spec) -> Tree:
        """Nothing is remembered."""
        return {}

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        """The payload of a tree."""
        return self._written(tree, shared).getvalue(), state

    def entropy_bits(self, tree: Tree, shared: Shared) -> float:
        """The empirical entropy of what is sent, in bits: symbols by their frequencies, all else by its length."""
        return self._written(tree, shared).ideal_bits

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        """The tree that a payload stands for."""
        source = Source(blob)
        decoded = self.bits.decode(source, spec, shared)
        spec = resolve(spec, decoded)
        for key, part, stages in self._parts(spec, shared):
            decoded |= from_vector(self._reader(source, key, stages)(num_values(part)), part)
        source.finish()
        return {name: decoded[name] for name in spec}

    def _parts(self, spec: Spec, shared: Shared) -> list[tuple[Key, Spec, tuple[Stage, ...]]]:
        leaves = floating(spec, shared.exact | shared.bernoulli)
        if not self.per_leaf:
            return [(shared.key, leaves, self.stages)]
        return [(shared.key.fold_in(n), {n: leaf}, self._shaped(leaf.shape)) for n, leaf in leaves.items()]

    def _shaped(self, shape: tuple[int, ...]) -> tuple[Stage, ...]:
        fitted = [stage.shaped(shape) if isinstance(stage, Shaped) else stage for stage in self.stages]
        if any(found is None and stage.quantizes for found, stage in zip(fitted, self.stages, strict=True)):
            raise ConfigError(
                f"{self.text}: a stage that quantizes must take every shape, but it leaves {shape} alone."
            )
        return tuple(stage for stage in fitted if stage is not None)

    def _written(self, tree: Tree, shared: Shared) -> Sink:
        sink = Sink()
        self.bits.encode(tree, shared, sink)
        for key, part, stages in self._parts(spec_of(tree), shared):
            self._writer(sink, key, stages)(to_vector({name: tree[name] for name in part}))
        return sink

    def _writer(self, sink: Sink, key: Key, stages: tuple[Stage, ...], depth: int = 0) -> Write:
        keys = _keys(key)

        def write(values: Tensor, alphabet: int = 0) -> None:
            key = next(keys)
            if not len(values):
                return
            if values.stride(0) != 1:
                values = values.clone(memory_format=torch.contiguous_format)
            if depth == len(stages):
                self.coder.encode(values, alphabet, sink)
            else:
                stages[depth].encode(values, key.fold_in(depth), sink, self._writer(sink, key, stages, depth + 1))

        return write

    def _reader(self, source: Source, key: Key, stages: tuple[Stage, ...], depth: int = 0) -> Read:
        keys = _keys(key)

        def read(size: int, alphabet: int = 0) -> Tensor:
            key = next(keys)
            if not size:
                return torch.zeros(0, dtype=torch.uint8 if alphabet else torch.float32)
            if depth == len(stages):
                return self.coder.decode(source, size, alphabet)
            rest = self._reader(source, key, stages, depth + 1)
            return stages[depth].decode(source, size, key.fold_in(depth), rest)

        return read


def _keys(key: Key) -> Iterator[Key]:
    """The key of what a stage hands on first, second …: two vectors should not be rounded by the same draws."""
    yield key
    yield from (key.fold_in("again", number) for number in itertools.count(1))
