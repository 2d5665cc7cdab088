"""A coder of integers that are not negative, counts above all: by their frequencies, or by those among equal counts of
before.

Whoever receives counts often has the last ones (`Shared.held`), and new counts resemble them. The values held are
contexts: each has a table of what the new ones cost. Either the new values are coded or their changes, which is
shorter where counts grow on; and a small leaf takes few contexts, since each table costs bytes. The sender compares
all of it by counting, before anything is coded.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import constriction
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laconic.codecs.entropy import (
    Indices,
    Probabilities,
    categorical,
    check_empty,
    coded_bytes,
    contexts_of,
    guarded,
    probabilities_of,
    ranks_of,
    read_symbols,
    read_words,
    table_of,
    write_symbols,
    write_words,
)
from laconic.codecs.stream import Bytes, Sink, Source
from laconic.codecs.vector import read_exact, write_exact
from laconic.core import Leaf, PayloadError

_FEW = 16  # integers that are not worth a code
_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LARGEST = 65535  # the largest integer that is coded
_CONTEXTS = (1, 4, 16, 64)  # so many at the most: what a sender tries
_SYMBOLS = 2 * _LARGEST + 1  # all changes of such integers


class IntegerCode(IntEnum):
    """How the integers of a leaf are coded: the byte before them."""

    PLAIN = 0
    SYMBOLS = 1
    HELD = 2


def has_code(dtype: torch.dtype, size: int) -> bool:
    """Whether a leaf of this type and size begins with a code at all."""
    return dtype in _TYPES and size >= _FEW


def write_integers(sink: Sink, leaf: Tensor, held: Tensor | None = None) -> None:
    """Write the integers of a leaf in the shortest code; `held` are those that the receiver has, if both ends know."""
    values = leaf.detach().cpu().contiguous().reshape(-1)
    low, high = (int(bound) for bound in torch.aminmax(values))
    if low >= 0 and high <= _LARGEST:
        draft = Sink()
        draft.write(bytes([IntegerCode.SYMBOLS]))
        draft.write_uint(high)
        write_symbols(draft, values.to(torch.uint8 if high < 256 else torch.int32), high + 1)
        shortest, ideal = draft.getvalue(), draft.ideal_bits
        if (known := _levels(held, Leaf(tuple(leaf.shape), leaf.dtype))) is not None:
            models = _models(values.numpy().astype(np.int64), known)
            model = min(models, key=lambda model: model.num_bytes, default=None)
            if model is not None and model.num_bytes < len(shortest):
                shortest, ideal = model.written(), model.bits
        if len(shortest) <= leaf.numel() * leaf.dtype.itemsize:
            sink.write(shortest, ideal_bits=ideal)
            return
    sink.write(bytes([IntegerCode.PLAIN]))
    write_exact({"": values}, sink)


def read_integers(source: Source, leaf: Leaf, held: Tensor | None = None) -> Tensor:
    """The integers of a leaf, given those that were held when they were written."""
    (code,) = source.read(1)
    if code == IntegerCode.PLAIN:
        return read_exact(source, {"": leaf})[""]
    largest = min(_LARGEST, torch.iinfo(leaf.dtype).max)
    if code == IntegerCode.SYMBOLS:
        values = read_symbols(source, leaf.size, source.read_uint(largest) + 1)
    elif code == IntegerCode.HELD and (known := _levels(held, leaf)) is not None:
        values = torch.from_numpy(_read_held(source, known, largest))
    else:
        raise PayloadError("coder", f"integers in code {code}, which has no meaning here")
    return values.to(leaf.dtype).reshape(leaf.shape)


def _levels(held: Tensor | None, leaf: Leaf) -> Indices | None:
    """What is held as contexts, if it is of the leaf's kind and could have been coded itself."""
    if held is None or Leaf(tuple(held.shape), held.dtype) != leaf:
        return None
    low, high = (int(bound) for bound in torch.aminmax(held))
    if low < 0 or high > _LARGEST:
        return None
    return held.detach().cpu().reshape(-1).numpy().astype(np.int64)


class _Model(NamedTuple):
    """Symbols above a base, in contexts of what is held: the values themselves, or their changes."""

    changes: bool
    most: int
    base: int
    symbols: Indices
    contexts: Bytes
    counts: Indices
    """How often each symbol occurs, by context."""

    @property
    def bits(self) -> float:
        """The symbols' entropy, given their contexts."""
        there = self.counts[self.counts > 0]
        return float(_xlog2(self.counts.sum(axis=1)).sum() - _xlog2(there).sum())

    @property
    def num_bytes(self) -> float:
        """About how long it is when written."""
        return 8 + self.counts.size + coded_bytes(1.001 * self.bits)

    def written(self) -> bytes:
        """The code: what the symbols are, a table for each context, and the symbols context by context."""
        sink = Sink()
        sink.write(bytes([IntegerCode.HELD, self.changes, self.most]))
        sink.write_uint(2 * self.base if self.base >= 0 else -2 * self.base - 1)
        sink.write_uint(self.counts.shape[1] - 1)
        tables = [table_of(row) for row in self.counts]
        sink.write(b"".join(table.tobytes() for table in tables))
        coder = constriction.stream.stack.AnsCoder()
        ordered = self.symbols[np.argsort(self.contexts, kind="stable")]
        parts = np.split(ordered, np.cumsum(self.counts.sum(axis=1))[:-1])
        for part, table in zip(parts[::-1], tables[::-1], strict=True):
            if np.count_nonzero(table) > 1:
                coder.encode_reverse(ranks_of(part.astype(np.int32), table), categorical(probabilities_of(table)[1]))
        write_words(sink, coder.get_compressed())
        return sink.getvalue()


def _models(values: Indices, held: Indices) -> list[_Model]:
    """All that is worth trying. One context with the values themselves is what `write_symbols` does."""
    at_level = np.bincount(held)
    models = []
    for changes in (False, True):
        symbols = values - held if changes else values
        base, alphabet = int(symbols.min()), int(np.ptp(symbols)) + 1
        symbols = symbols - base
        # Joined counts by level first: contexts are sums of levels, so the values are looked at once.
        if len(at_level) * alphabet > max(4 * len(values), 1 << 16):
            continue
        joint = np.bincount(held * alphabet + symbols, minlength=len(at_level) * alphabet).reshape(-1, alphabet)
        for most in _CONTEXTS:
            context = contexts_of(at_level, most)
            counts = np.zeros((int(context.max()) + 1, alphabet), np.int64)
            np.add.at(counts, context, joint)
            models.append(_Model(changes, most, base, symbols, np.take(context, held), counts))
    return models


def _read_held(source: Source, held: Indices, largest: int) -> Indices:
    changes, most = source.read(2)
    if changes > 1 or not 1 <= most <= max(_CONTEXTS):
        raise PayloadError("coder", f"integers given what is held in a form of {changes}, {most}, which has no meaning")
    folded = source.read_uint(_SYMBOLS)
    base = -(folded + 1 >> 1) if folded & 1 else folded >> 1
    alphabet = source.read_uint(_SYMBOLS - 1) + 1
    at_level = np.bincount(held)
    contexts = np.take(contexts_of(at_level, most), held)
    sizes = np.bincount(contexts)
    tables = source.array(len(sizes) * alphabet).reshape(-1, alphabet)
    ordered = np.empty(len(held), np.int64)
    with guarded():
        coder = constriction.stream.stack.AnsCoder(read_words(source))
        for end, size, table in zip(np.cumsum(sizes).tolist(), sizes.tolist(), tables, strict=True):
            ordered[end - size : end] = _read_context(coder, table, size)
        check_empty(coder)
    values = np.empty(len(held), np.int64)
    values[np.argsort(contexts, kind="stable")] = ordered
    values += base
    if changes:
        values += held
    if int(values.min()) < 0 or int(values.max()) > largest:
        raise PayloadError("symbol", f"integers from {int(values.min())} to {int(values.max())}, beyond 0 to {largest}")
    return values


def _read_context(coder: Any, table: Bytes, size: int) -> Indices:
    if np.count_nonzero(table) == 1:  # all the same: nothing is coded
        return np.full(size, np.flatnonzero(table)[0], np.int64)
    present, probabilities = probabilities_of(table)
    ranks: npt.NDArray[np.int32] = coder.decode(categorical(probabilities), size)
    return np.take(present, ranks)


def _xlog2(counts: Indices) -> Probabilities:
    exact = counts.astype(np.float64)
    terms: Probabilities = exact * np.log2(np.maximum(exact, 1))
    return terms
