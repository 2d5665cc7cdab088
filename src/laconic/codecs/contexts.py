"""Contexts: a coder of levels (small integers, most of them 0) that knows in which leaf, row and column each value is.

In the change of a weight matrix, whole rows and columns are silent and others loud: the magnitude of a value is close
to the product of what its row and its column do. So values are coded in *phases*, each half as large as all before it.
Which phase a value is in looks random, so that after a few of them something has been seen of every row and every
column; the levels seen there say how likely the next ones are to be 0. Nothing of this is sent: the receiver has seen
the same.

Each value has a *context*, the logarithm of its odds not to be 0 as its row, column, channel and leaf suggest. Bits of
one context share frequencies, which begin at what the context says and then follow the bits themselves. Contexts and
frequencies are whole numbers, so that both ends have the same probabilities.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import constriction
import numpy as np
import numpy.typing as npt

from laconic.codecs.entropy import check_empty, guarded, read_words, write_words
from laconic.codecs.stream import Sink, Source
from laconic.codecs.vector import unpack_bits
from laconic.core import PayloadError

Levels = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int32]
Contexts = npt.NDArray[np.uint16]
Bits = npt.NDArray[np.bool_]

CONTEXTS = 128
LARGEST_LEVEL = (1 << 23) - 1
_FIRST_PHASE = 256  # values, about: what is seen before anything is known
_SILENT = 0  # the byte of a message of zeros
_MIDDLE = 128  # the byte of even odds
_EIGHTHS = 2  # of an octave of odds, for each context
_UNIT = 1 << 16
_WORTH = 8 * _UNIT  # what a context says counts like eight bits seen
_PLAIN = 15  # magnitudes up to here have a token each, and count in full; above, a token for each power of two
_TOKENS = _PLAIN + 19
_SIGN = _TOKENS  # the question after those of magnitudes
_REACHES = 16
_HALF = 1 << 23  # of a draw of 24 bits


@dataclass(frozen=True, eq=False)
class Layout:
    """Where values lie: all arrays are in coding order, and groups are numbered through all leaves."""

    order: Numbers
    row: Numbers
    column: Numbers
    row_leaf: Numbers
    column_channel: Numbers
    channel_leaf: Numbers
    phases: tuple[slice, ...]

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self.order)

    @functools.cached_property
    def rows_seen(self) -> list[npt.NDArray[np.int64]]:
        """How many values of each row there are in each phase."""
        return [np.bincount(self.row[part], minlength=len(self.row_leaf)) for part in self.phases]

    @functools.cached_property
    def columns_seen(self) -> list[npt.NDArray[np.int64]]:
        """How many values of each column there are in each phase."""
        return [np.bincount(self.column[part], minlength=len(self.column_channel)) for part in self.phases]


@functools.lru_cache(maxsize=4)
def layout_of(shapes: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout of leaves of these shapes, one after the other.

    A leaf's rows are along its first axis, its columns along all others, its channels along the second; a leaf with
    fewer than two axes is one row and one column.
    """
    row: list[Numbers] = []
    column: list[Numbers] = []
    row_leaf: list[Numbers] = []
    column_channel: list[Numbers] = []
    channel_leaf: list[Numbers] = []
    rows = columns = channels = 0
    for leaf, shape in enumerate(shapes):
        high, wide, deep = (shape[0], math.prod(shape[1:]), shape[1]) if len(shape) > 1 else (1, 1, 1)
        if not math.prod(shape):
            continue
        if len(shape) > 1:
            row.append(np.repeat(np.arange(rows, rows + high, dtype=np.int32), wide))
            column.append(np.tile(np.arange(columns, columns + wide, dtype=np.int32), high))
        else:
            row.append(np.full(math.prod(shape), rows, np.int32))
            column.append(np.full(math.prod(shape), columns, np.int32))
        row_leaf.append(np.full(high, leaf, np.int32))
        column_channel.append(channels + np.arange(wide, dtype=np.int32) // (wide // deep))
        channel_leaf.append(np.full(deep, leaf, np.int32))
        rows, columns, channels = rows + high, columns + wide, channels + deep
    order, phases = _phases(sum(map(len, row)))
    return Layout(
        order,
        _joined(row)[order],
        _joined(column)[order],
        _joined(row_leaf),
        _joined(column_channel),
        _joined(channel_leaf),
        phases,
    )


def _joined(parts: list[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _phases(size: int) -> tuple[npt.NDArray[np.int32], tuple[slice, ...]]:
    """The order in which values are coded, and the part of it that each phase is."""
    ends = [1 << 32]
    while size * (end := 2 * ends[0] // 3) >= _FIRST_PHASE << 32:
        ends.insert(0, end)
    mixed = np.arange(size, dtype=np.uint32) * np.uint32(0x9E3779B1)
    for shift, factor in ((15, 0x85EBCA77), (13, 0xC2B2AE3D)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    phase = np.searchsorted(np.array(ends[:-1], np.uint64), mixed, side="right").astype(np.uint8)
    order = np.argsort(phase, kind="stable").astype(np.int32)
    bounds = np.cumsum([0, *np.bincount(phase, minlength=len(ends))]).tolist()
    return order, tuple(slice(a, b) for a, b in itertools.pairwise(bounds))


# --- what probabilities are made of -------------------------------------------------------------------------------


class _Activity:
    """How large the levels are that were seen in each leaf, channel, column and row, and the contexts that follow."""

    def __init__(self, layout: Layout, odds: int) -> None:
        self._layout, self._odds = layout, odds
        self._leaves = int(layout.row_leaf.max()) + 1
        self._rows = np.zeros((2, len(layout.row_leaf)))
        self._columns = np.zeros((2, len(layout.column_channel)))

    def contexts(self, phase: int) -> Contexts:
        """The context of each value of a phase."""
        layout, part = self._layout, self._layout.phases[phase]
        mean = _mean(self._rows.sum(axis=1), 2.0 ** (self._odds / 8))
        leaves = _mean(_pooled(self._rows, layout.row_leaf, self._leaves), mean)
        channels = _mean(
            _pooled(self._columns, layout.column_channel, len(layout.channel_leaf)), leaves[layout.channel_leaf]
        )
        columns = _mean(self._columns, channels[layout.column_channel])
        of_leaf = leaves[layout.row_leaf]
        rows = _mean(self._rows, of_leaf)
        by_row, by_column = _eighths(rows / of_leaf), _eighths(columns / mean) + self._odds + _EIGHTHS * CONTEXTS // 2
        score = np.take(by_row, layout.row[part])
        score += np.take(by_column, layout.column[part])
        score >>= 1
        return np.clip(score, 0, CONTEXTS - 1, out=score).astype(np.uint16)

    def saw(self, phase: int, at: npt.NDArray[np.intp], tokens: Levels) -> None:
        """The values of a phase that are not 0, and their tokens."""
        layout, start = self._layout, self._layout.phases[phase].start
        counted = np.minimum(tokens, _PLAIN)
        self._rows[0] += np.bincount(layout.row[start + at], counted, len(layout.row_leaf))
        self._columns[0] += np.bincount(layout.column[start + at], counted, len(layout.column_channel))
        self._rows[1] += layout.rows_seen[phase]
        self._columns[1] += layout.columns_seen[phase]


def _pooled(sums: npt.NDArray[np.float64], group: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.float64]:
    return np.stack([np.bincount(group, part, count) for part in sums])


def _mean(sums: npt.NDArray[np.float64], expected: Any) -> Any:
    """Means of sums over numbers of values, drawn towards what is expected as if half a level had been seen before."""
    return (sums[0] + 0.5) / (sums[1] + 0.5 / expected)


def _eighths(ratio: npt.NDArray[np.float64]) -> npt.NDArray[np.int16]:
    return np.asarray(np.rint(8 * np.log2(ratio)), np.int16)


@dataclass(frozen=True)
class Dither:
    """What both ends know of how each value was rounded: ⌊x/Δ + u⌋ with a u in [0, 1) that both draw.

    A small value becomes 0 unless u is near 0, and the value negative, or near 1, and the value positive. So u says
    which of the values may have become something, and with which sign. `reach` is how near u is, in half octaves.
    """

    reach: npt.NDArray[np.uint16]
    up: Bits

    @classmethod
    def of(cls, draws: npt.NDArray[np.uint32]) -> Dither:
        """From draws of 24 bits, of which u is the 2²⁴th part."""
        up = draws >= _HALF
        distance = np.where(up, np.uint32(2 * _HALF) - draws, draws)
        return cls(np.searchsorted(_STEPS, distance, side="left").astype(np.uint16), up)


_STEPS = np.array([round(_HALF * 2 ** ((reach - _REACHES) / 2)) for reach in range(1, _REACHES)], np.uint32)


class Frequencies:
    """Yes and no seen in each context, for each question: is it above 0, above 1, above 2, … Where rounding is known, a
    context of the first is one of activity and of reach, and a last question asks for the sign that u suggests."""

    def __init__(self, *, dithered: bool) -> None:
        odds = 2.0 ** (_EIGHTHS * (np.arange(CONTEXTS) - CONTEXTS // 2) / 8)
        first, sign = odds / (1 + odds), odds
        if dithered:
            reach = 2.0 ** ((np.arange(_REACHES) - _REACHES - 0.5) / 2)
            near, far = (np.exp(-np.divide.outer(t, odds).T.reshape(-1)) / 2 for t in (reach / 2, 1 - reach / 2))
            first, sign = near + far, near / np.maximum(near + far, 1e-300)
        self._counts = [_begun(first)] + [_begun(np.full(CONTEXTS, 0.25), 4 * _UNIT) for _ in range(_TOKENS - 1)]
        self._counts.append(_begun(sign))

    def size(self, question: int) -> int:
        """How many contexts there are."""
        return len(self._counts[question][0])

    def probability(self, question: int) -> npt.NDArray[np.float64]:
        """That the answer is yes, in each context."""
        yes, no = self._counts[question]
        return np.asarray(yes / (yes + no))

    def saw(self, question: int, ones: npt.NDArray[np.int64], total: npt.NDArray[np.int64]) -> None:
        """More answers."""
        self._counts[question] += _UNIT * np.stack([ones, total - ones])


def _begun(probability: npt.NDArray[np.float64], worth: int = _WORTH) -> npt.NDArray[np.float64]:
    yes = np.maximum(np.rint(worth * probability), 1.0)
    return np.stack([yes, np.maximum(worth - yes, 1.0)])


# --- one walk for writing, reading and counting ---------------------------------------------------------------------


class _Port(Protocol):
    """Where bits go to, or come from."""

    def bits(self, contexts: Contexts, probability: npt.NDArray[np.float64], truth: Bits) -> Bits:
        """The bits of these contexts, of which each has its probability."""
        ...


class _Walked(NamedTuple):
    """All tokens in coding order, whether signs are as u suggests, the contexts of activity, and the frequencies."""

    tokens: Levels
    agree: Bits
    contexts: Contexts
    frequencies: Frequencies


def _walk(layout: Layout, odds: int, port: _Port, wanted: Levels, agree: Bits, dither: Dither | None) -> _Walked:
    """Ask all questions. A port that takes bits from somewhere does not look at what is wanted."""
    tokens = np.zeros(layout.size, np.int32)
    contexts = np.zeros(layout.size, np.uint16)
    agree = agree.copy()
    activity, frequencies = _Activity(layout, odds), Frequencies(dithered=dither is not None)
    for phase, part in enumerate(layout.phases):
        here = contexts[part] = activity.contexts(phase)
        truth = wanted[part]
        alive = np.arange(part.stop - part.start)
        found = tokens[part]
        fine = here if dither is None else here * np.uint16(_REACHES) + dither.reach[part]
        yes = _asked(port, frequencies, 0, fine, truth > 0)
        loud = alive = alive[yes]
        if dither is not None:
            signs = agree[part]
            signs[loud] = _asked(port, frequencies, _SIGN, fine[yes], signs[loud])
        here = here // 5 * 5  # of what is not 0, contexts may be coarser: there is less of it
        for question in range(1, _TOKENS):
            found[alive] += 1
            here, truth = here[yes], truth[yes]
            if not len(alive):
                break
            yes = _asked(port, frequencies, question, here, truth > question)
            alive = alive[yes]
        else:
            found[alive] += 1
        activity.saw(phase, loud, found[loud])
    return _Walked(tokens, agree, contexts, frequencies)


def _asked(port: _Port, frequencies: Frequencies, question: int, contexts: Contexts, truth: Bits) -> Bits:
    bits = port.bits(contexts, frequencies.probability(question), truth)
    size = frequencies.size(question)
    frequencies.saw(question, np.bincount(contexts[bits], minlength=size), np.bincount(contexts, minlength=size))
    return bits


class _Count:
    """Adds up what bits cost, and writes nothing."""

    def __init__(self) -> None:
        self.total = 0.0

    def bits(self, contexts: Contexts, probability: npt.NDArray[np.float64], truth: Bits) -> Bits:
        """The truth."""
        ones = np.bincount(contexts[truth], minlength=len(probability))
        zeros = np.bincount(contexts, minlength=len(probability)) - ones
        self.total -= float(ones @ np.log2(probability) + zeros @ np.log2(1 - probability))
        return truth


class _Write:
    """Keeps bits and their probabilities: a stack is written from its end."""

    def __init__(self) -> None:
        self._kept: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]] = []

    def bits(self, contexts: Contexts, probability: npt.NDArray[np.float64], truth: Bits) -> Bits:
        """The truth."""
        self._kept.append((truth.astype(np.int32), np.take(probability, contexts)))
        return truth

    def finish(self, coder: Any) -> None:
        """Everything, into a coder that gives it back in the order in which it came."""
        for bits, probability in reversed(self._kept):
            coder.encode_reverse(bits, _MODEL, probability)


class _Read:
    """Takes bits from a coder."""

    def __init__(self, coder: Any) -> None:
        self._coder = coder

    def bits(self, contexts: Contexts, probability: npt.NDArray[np.float64], truth: Bits) -> Bits:
        """What was written."""
        return np.asarray(self._coder.decode(_MODEL, np.take(probability, contexts))).astype(np.bool_)


_MODEL = constriction.stream.model.Bernoulli(perfect=False)


# --- levels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What levels would cost, and what the model made of them."""

    num_bytes: float
    contexts: Contexts
    frequencies: Frequencies


def cost_of(levels: Levels, layout: Layout, dither: Dither | None = None) -> Cost:
    """The cost of levels (in coding order), up to a few bytes."""
    magnitudes = np.abs(levels)
    tokens, port = _tokens(magnitudes), _Count()
    _, _, contexts, frequencies = _walk(layout, _odds(magnitudes), port, tokens, _agree(levels, dither), dither)
    rest = float(_width(tokens[tokens > _PLAIN]).sum())
    signs = np.count_nonzero(magnitudes) if dither is None else 0
    return Cost(5 + (port.total + rest + signs) / 8, contexts, frequencies)


def write_levels(sink: Sink, levels: Levels, layout: Layout, dither: Dither | None = None) -> None:
    """Write levels, given in coding order; shorter where it is known how they were rounded."""
    magnitudes = np.abs(levels)
    loud = magnitudes > 0
    if not loud.any():
        sink.write(bytes([_SILENT]))
        return
    odds = _odds(magnitudes)
    tokens = _tokens(magnitudes)
    port = _Write()
    _walk(layout, odds, port, tokens, _agree(levels, dither), dither)
    coder = constriction.stream.stack.AnsCoder()
    for token in range(_TOKENS, _PLAIN, -1):
        part = magnitudes[tokens == token]
        if len(part):
            coder.encode_reverse(part - (1 << _width(token)), constriction.stream.model.Uniform(1 << _width(token)))
    port.finish(coder)
    sink.write(bytes([odds + _MIDDLE]))
    write_words(sink, coder.get_compressed())
    if dither is None:
        sink.write(np.packbits(levels[loud] < 0, bitorder="little").tobytes())


def read_levels(source: Source, layout: Layout, dither: Dither | None = None) -> Levels:
    """What `write_levels` wrote, in coding order."""
    (byte,) = source.read(1)
    if byte == _SILENT:
        return np.zeros(layout.size, np.int32)
    with guarded():
        coder = constriction.stream.stack.AnsCoder(read_words(source))
        nothing = np.zeros(layout.size, np.int32)
        levels, agree, _, _ = _walk(layout, byte - _MIDDLE, _Read(coder), nothing, nothing > 0, dither)
        for token in np.unique(levels[levels > _PLAIN]).tolist():
            at = np.flatnonzero(levels == token)
            low = coder.decode(constriction.stream.model.Uniform(1 << _width(token)), len(at))
            levels[at] = -low - (1 << _width(token))  # below 0, so that no other token finds them
        check_empty(coder)
    np.abs(levels, out=levels)
    loud = np.flatnonzero(levels)
    if not len(loud):
        raise PayloadError("symbols", "levels that are all 0 take a single byte")
    if dither is None:
        negative = unpack_bits(source.array(-(-len(loud) // 8)), len(loud)).view(np.bool_)
    else:
        negative = agree[loud] ^ dither.up[loud]
    levels[loud] *= 1 - 2 * negative.astype(np.int32)
    return levels


def _agree(levels: Levels, dither: Dither | None) -> Bits:
    """Whether signs are those that the draws suggest."""
    return np.asarray((levels > 0) == (dither.up if dither is not None else True))


def _odds(magnitudes: Levels) -> int:
    """The odds of a level not to be 0, in eighths of an octave."""
    loud = max(int(np.count_nonzero(magnitudes)), 1)
    return int(np.clip(round(8 * math.log2(loud / (len(magnitudes) - loud + 0.5))), 1 - _MIDDLE, _MIDDLE - 1))


def _width(token: Any) -> Any:
    """How many bits of a magnitude follow its token."""
    return token - _PLAIN + 3


def _tokens(magnitudes: Levels) -> Levels:
    """The magnitude itself up to 15; 16 for 16 to 31, 17 for 32 to 63 …"""
    large = magnitudes > _PLAIN
    if not large.any():
        return magnitudes
    tokens = magnitudes.copy()
    _, exponent = np.frexp(magnitudes[large].astype(np.float64))
    tokens[large] = exponent + (_PLAIN - 4)
    return tokens
