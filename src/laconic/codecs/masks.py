"""Coders of what passes exactly: bits and integers, plainly or in as few bits as their statistics allow.

A mask costs one bit per value at the most. How much less depends on what both ends know: the frequency of ones, or the
probability that each bit has by itself (`Shared.expected`: what the server believes, and what it broadcast). Both ends
can then sort the bits into *contexts* of equal probability. The sender tells each context's real frequency, which
corrects what was expected, and the bits of a context are coded with one probability. Lengths are known from counts
before anything is coded, so that the shortest code is written and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol

import constriction
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laconic.codecs.entropy import (
    Candidate,
    Indices,
    Probabilities,
    Words,
    bernoulli,
    check_empty,
    coded_bytes,
    contexts_of,
    guarded,
    write_shortest,
)
from laconic.codecs.integers import has_code, read_integers, write_integers
from laconic.codecs.stream import Bytes, Sink, Source
from laconic.codecs.vector import floating, read_exact, unpack_bits, write_exact
from laconic.core import Leaf, PayloadError, Shared, Spec, Tree, cut, resolve

MaskModel = Literal["shared", "layer", "global", "raw"]
Levels = npt.NDArray[np.uint16]

_CERTAIN = 65535  # a frequency of this says that all bits are 1; 0 says that none is
_CONTEXTS = 64  # at the most: where more probabilities differ, neighbours share a context
_SLICE = 1 << 16  # bits at a time, where each has a probability of its own
_WORTH = 2**-10  # what a probability for each bit must save against contexts


class BitCode(IntEnum):
    """How the bits of a message are coded: the byte before them."""

    PACKED = 0
    ONE = 1
    LEAF = 2
    CONTEXT = 3
    GIVEN = 4


class BitCoder(Protocol):
    """Writes the leaves that pass exactly (bits, integers, what both ends agree on), losslessly."""

    def encode(self, tree: Mapping[str, Tensor], shared: Shared, sink: Sink) -> None:
        """Write those leaves of a tree, and no others."""
        ...

    def decode(self, source: Source, spec: Spec, shared: Shared) -> Tree:
        """Read those leaves of a spec; `PayloadError` on anything that `encode` does not write."""
        ...


@dataclass(frozen=True)
class Plain:
    """Bits as bits, everything else as it lies in memory."""

    def encode(self, tree: Mapping[str, Tensor], shared: Shared, sink: Sink) -> None:
        """Write the leaves."""
        write_exact(tree, sink, shared.exact)

    def decode(self, source: Source, spec: Spec, shared: Shared) -> Tree:
        """Read the leaves."""
        return read_exact(source, spec, shared.exact)


@dataclass(frozen=True)
class Coded:
    """All bits of the message in the shortest code that `model` allows, then integers by their frequencies.

    | `model` | codes that the sender may choose from |
    |---|---|
    | `raw` | packed: 1 bit each |
    | `global` | that, or one frequency for all bits of the message |
    | `layer` | those, or one for each leaf |
    | `shared` | those, or one for each context, or the expected probability of each bit as it is |

    A receiver reads all of them. Leaves of at least sixteen integers that are not negative are coded by their
    frequencies, or by those among equal values of what the receiver holds, where that is shorter; the others, and exact
    floating-point leaves, are written as they lie in memory.
    """

    model: MaskModel = "shared"

    def encode(self, tree: Mapping[str, Tensor], shared: Shared, sink: Sink) -> None:
        """Write the bits, then the other leaves in their order."""
        bits = {name: leaf for name, leaf in tree.items() if leaf.dtype == torch.bool}
        write_bits(sink, bits, shared.expected, self.model)
        for name, leaf in tree.items():
            if leaf.dtype == torch.bool or (leaf.is_floating_point() and name not in shared.exact):
                continue
            if has_code(leaf.dtype, leaf.numel()):
                write_integers(sink, leaf, shared.held.get(name))
            else:
                write_exact({name: leaf}, sink, shared.exact)

    def decode(self, source: Source, spec: Spec, shared: Shared) -> Tree:
        """Read what was written."""
        quantised = floating(spec, shared.exact)
        tree = read_bits(source, {n: leaf for n, leaf in spec.items() if leaf.dtype == torch.bool}, shared.expected)
        for name, leaf in spec.items():
            if name in quantised or name in tree:
                continue
            leaf = leaf if leaf.length is None else resolve({name: leaf}, tree)[name]  # follows from what came before
            if has_code(leaf.dtype, leaf.size):
                tree[name] = read_integers(source, leaf, shared.held.get(name))
            else:
                tree |= read_exact(source, {name: leaf}, shared.exact)
        return tree


# --- bits ---------------------------------------------------------------------------------------------------------


def write_bits(sink: Sink, leaves: Mapping[str, Tensor], expected: Mapping[str, Tensor], model: MaskModel) -> None:
    """Write leaves of bits as one sequence, in the shortest code that the model allows."""
    bits = np.concatenate([np.zeros(0, np.uint8), *(_bytes(leaf) for leaf in leaves.values())])
    sizes = np.array([leaf.numel() for leaf in leaves.values()], np.int64)
    if not len(bits):
        return
    ones = int(np.count_nonzero(bits))
    whole = _Groups(np.array([len(bits)]), np.array([ones]))

    def pack(sink: Sink) -> None:
        sink.write(np.packbits(bits, bitorder="little").tobytes())

    candidates = [Candidate(-(-len(bits) // 8), BitCode.PACKED, pack)]
    ideal = whole.bits
    if model != "raw":
        candidates.append(whole.candidate(BitCode.ONE, bits))
    if model in ("layer", "shared") and len(sizes) > 1:
        ends = np.cumsum(sizes)
        counts = [int(np.count_nonzero(bits[end - size : end])) for size, end in zip(sizes, ends, strict=True)]
        candidates.append(_Groups(sizes, np.array(counts)).candidate(BitCode.LEAF, bits))
    if model == "shared" and not expected.keys().isdisjoint(leaves):
        levels = levels_of({name: leaf.numel() for name, leaf in leaves.items()}, expected)
        known = Expectation(levels)
        ones_at = np.bincount(levels * bits, minlength=_CERTAIN)
        ones_at[0] = ones - ones_at[1:].sum()  # the bits that are 0 were counted there
        groups = _Groups(known.sizes, known.sums(ones_at))
        candidates.append(groups.candidate(BitCode.CONTEXT, bits, known))
        cross = _cost(ones_at, known.counts, known.probabilities)
        ideal = min(ideal, cross)
        # Three times slower than contexts, so it must be worth it.
        handicap = 1 + _WORTH
        candidates.append(
            Candidate(coded_bytes(cross) * handicap, BitCode.GIVEN, lambda sink: _write_given(sink, bits, known))
        )
    write_shortest(sink, candidates, ideal_bits=ideal)


def read_bits(source: Source, leaves: Mapping[str, Leaf], expected: Mapping[str, Tensor]) -> Tree:
    """Leaves of bits; every size comes from their spec."""
    sizes = np.array([leaf.size for leaf in leaves.values()], np.int64)
    size = int(sizes.sum())
    bits = np.zeros(0, np.uint8)
    if size:
        (code,) = source.read(1)
        informed = not expected.keys().isdisjoint(leaves)
        if code == BitCode.PACKED:
            bits = unpack_bits(source.array(-(-size // 8)), size)
        elif code == BitCode.ONE:
            bits = _read_groups(source, np.array([size]))
        elif code == BitCode.LEAF and len(sizes) > 1:
            bits = _read_groups(source, sizes)
        elif code in (BitCode.CONTEXT, BitCode.GIVEN) and informed:
            known = Expectation(levels_of({name: leaf.size for name, leaf in leaves.items()}, expected))
            if code == BitCode.CONTEXT:
                bits = np.empty(size, np.uint8)
                bits[known.order] = _read_groups(source, known.sizes)
            else:
                bits = _read_given(source, known)
        else:
            raise PayloadError("coder", f"bits in code {code}, which has no meaning here")
    return cut(torch.from_numpy(bits).view(torch.bool), leaves)


class _Groups(NamedTuple):
    """Bits in groups of one frequency each: how many there are, and how many of them are 1."""

    sizes: Indices
    ones: Indices

    @property
    def frequencies(self) -> Levels:
        """In 65535ths; 0 and 65535 only where all bits are the same."""
        rounded = np.rint(_CERTAIN * (self.ones / np.maximum(self.sizes, 1))).clip(1, _CERTAIN - 1)
        rounded[self.ones == 0] = 0
        rounded[self.ones == self.sizes] = _CERTAIN
        return rounded[self.sizes > 0].astype(np.uint16)

    @property
    def bits(self) -> float:
        """What the bits cost with these frequencies."""
        there = self.sizes > 0
        return _cost(self.ones[there], self.sizes[there], self.frequencies / _CERTAIN)

    def candidate(self, code: BitCode, bits: Bytes, known: Expectation | None = None) -> Candidate:
        """The code with a frequency for each group."""
        frequencies = self.frequencies

        def write(sink: Sink) -> None:
            _write_groups(sink, bits if known is None else bits[known.order], self.sizes, frequencies)

        return Candidate(2 * len(frequencies) + coded_bytes(self.bits), code, write)


class Expectation:
    """What both ends know of each bit: its probability to be 1 in 65535ths, 0 where nothing is expected of it.

    Each level is a context, or neighbours share one of at most 64 (`contexts_of`).
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.counts = np.bincount(levels, minlength=_CERTAIN)
        self.probabilities = np.arange(len(self.counts)) / _CERTAIN
        self.probabilities[0] = 0.5
        self.contexts = contexts_of(self.counts, _CONTEXTS)
        self.sizes = self.sums(self.counts)

    def sums(self, counts: Indices) -> Indices:
        """Counts of levels as counts of contexts."""
        sums = np.bincount(self.contexts, weights=counts)  # whole numbers far below 2⁵³: exact
        return sums.astype(np.int64)

    @property
    def order(self) -> Indices:
        """The bits' positions context by context, in their order within each."""
        return np.argsort(np.take(self.contexts, self.levels), kind="stable")


def levels_of(sizes: Mapping[str, int], expected: Mapping[str, Tensor]) -> Levels:
    """What is expected of the bits of some leaves, one after the other; 0 where nothing is."""
    parts = []
    for name, size in sizes.items():
        part = torch.zeros(size)
        if name in expected:
            if expected[name].numel() != size:
                raise RuntimeError(f"{expected[name].numel()} probabilities are given for the {size} bits of {name!r}.")
            part = expected[name].detach().to("cpu", torch.float32).reshape(-1) * float(_CERTAIN)
            part = part.round_().clamp_(1, _CERTAIN - 1)
        parts.append(part.numpy().astype(np.uint16))
    return np.concatenate(parts)


def _write_groups(sink: Sink, bits: Bytes, sizes: Indices, frequencies: Levels) -> None:
    sink.write(frequencies.astype("<u2").tobytes())
    coder = constriction.stream.stack.AnsCoder()
    sizes = sizes[sizes > 0]
    for end, size, frequency in zip(np.cumsum(sizes)[::-1], sizes[::-1], frequencies[::-1], strict=True):
        if 0 < frequency < _CERTAIN:
            coder.encode_reverse(bits[end - size : end].astype(np.int32), _model(int(frequency)))
    _write_words(sink, coder.get_compressed())


def _read_groups(source: Source, sizes: Indices) -> Bytes:
    sizes = sizes[sizes > 0]
    frequencies = np.frombuffer(source.read(2 * len(sizes)), "<u2")
    bits = np.empty(int(sizes.sum()), np.uint8)
    with guarded():
        coder = constriction.stream.stack.AnsCoder(_read_words(source))
        at = 0
        for size, frequency in zip(sizes.tolist(), frequencies.tolist(), strict=True):
            certain = frequency in (0, _CERTAIN)
            bits[at : at + size] = frequency > 0 if certain else coder.decode(_model(frequency), size)
            at += size
        check_empty(coder)
    return bits


def _model(frequency: int) -> Any:
    return bernoulli(frequency / _CERTAIN)


def _write_given(sink: Sink, bits: Bytes, known: Expectation) -> None:
    coder = constriction.stream.stack.AnsCoder()
    model = constriction.stream.model.Bernoulli(perfect=False)
    for start in reversed(range(0, len(bits), _SLICE)):
        part = slice(start, start + _SLICE)
        coder.encode_reverse(bits[part].astype(np.int32), model, np.take(known.probabilities, known.levels[part]))
    _write_words(sink, coder.get_compressed())


def _read_given(source: Source, known: Expectation) -> Bytes:
    bits = np.empty(len(known.levels), np.uint8)
    model = constriction.stream.model.Bernoulli(perfect=False)
    with guarded():
        coder = constriction.stream.stack.AnsCoder(_read_words(source))
        for start in range(0, len(bits), _SLICE):
            part = slice(start, start + _SLICE)
            bits[part] = coder.decode(model, np.take(known.probabilities, known.levels[part]))
        check_empty(coder)
    return bits


def _write_words(sink: Sink, words: Words) -> None:
    """The bytes of the words after their number, without the zeros at the end: a mask may be a few bytes in all."""
    coded = words.astype("<u4").tobytes().rstrip(b"\0")
    sink.write_uint(len(coded))
    sink.write(coded)


def _read_words(source: Source) -> Words:
    coded = bytes(source.read(source.read_uint(source.left)))
    if coded.endswith(b"\0"):
        raise PayloadError("symbols", "coded bits that end in zeros")
    return np.frombuffer(coded + bytes(-len(coded) % 4), "<u4").astype(np.uint32)


def _cost(ones: Indices, sizes: Indices, probabilities: Probabilities) -> float:
    """Bits that so many ones among so many bits cost with given probabilities; nothing where all are certain."""
    coded = (sizes > 0) & (probabilities > 0) & (probabilities < 1)
    ones, zeros, p = ones[coded], (sizes - ones)[coded], probabilities[coded]
    return -float(ones @ np.log2(p) + zeros @ np.log2(1 - p))


def _bytes(leaf: Tensor) -> Bytes:
    return leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
