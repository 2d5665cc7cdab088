"""Coders of symbols and of indices: exact, and as short as the symbols' own statistics allow.

Several codes are at hand for the same symbols; the sender estimates the length of each and writes the shortest, after
one byte that says which. Probabilities are made of integers and the four basic operations only, so that both ends have
the same ones on any machine. The number of symbols always comes from the receiver; constriction would decode anything,
so we check besides that nothing of a code is left over at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import constriction
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laconic.codecs.stream import Sink, Source
from laconic.codecs.vector import unpack_bits
from laconic.core import PayloadError

Symbols = npt.NDArray[np.uint8] | npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]
Probabilities = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_BLOCK = 1024  # symbols between two adaptations
_MEMORY = 8  # blocks that the adaptive model remembers, about
_SLICE = 1 << 16  # symbols at a time, where something wider than a symbol is needed for each
_ESCAPE = 255
_CLOSEST = 2.0**-16  # a given probability is never closer to 0 or 1: a wrong guess costs 16 bits, not everything
_WEIGHTS = np.array([round(2 ** (32 - step / 8)) for step in range(255)], np.float64)


class Code(IntEnum):
    """How symbols are coded: the byte before them."""

    PACKED = 0
    CONSTANT = 1
    STATIC = 2
    ADAPTIVE = 3
    GIVEN = 4


class IndexCode(IntEnum):
    """How indices are coded: the byte before them."""

    BITMAP = 0
    GEOMETRIC = 1
    TABLE = 2


class Candidate(NamedTuple):
    """A code that could be used: how long it would be, its byte, and how to write it."""

    num_bytes: float
    code: int
    write: Callable[[Sink], None]


@dataclass(frozen=True)
class Entropy:
    """The coder of symbols. See `write_symbols`."""

    def encode(self, values: Tensor, alphabet: int, sink: Sink) -> None:
        """Write the symbols in their shortest code."""
        write_symbols(sink, values, alphabet)

    def decode(self, source: Source, size: int, alphabet: int) -> Tensor:
        """Read `size` symbols."""
        return read_symbols(source, size, alphabet)


def write_symbols(sink: Sink, symbols: Tensor, alphabet: int, *, given: Tensor | None = None) -> None:
    """Write symbols in [0, alphabet) in the shortest of the codes that fit:

    * packed: bit planes;
    * constant: all the same;
    * static: a table of frequencies, then an asymmetric numeral system;
    * adaptive (bits): the frequency follows the last few thousand bits;
    * given (bits): each bit has a probability to be 1 that both ends know, `given`.
    """
    array: Symbols = symbols.numpy()
    size = len(array)
    counts = _counts(array, alphabet)
    present = np.flatnonzero(counts)
    costs = -np.log2(counts[present] / size)
    entropy = float(counts[present] @ costs)
    if len(present) == 1:
        candidates = [Candidate(0, Code.CONSTANT, lambda sink: sink.write_uint(int(present[0])))]
    else:
        table = table_of(counts)
        cross = -float(counts[present] @ np.log2(probabilities_of(table)[1]))
        candidates = [
            Candidate(_width(alphabet) * -(-size // 8), Code.PACKED, lambda sink: _write_packed(sink, array, alphabet)),
            Candidate(alphabet + coded_bytes(cross), Code.STATIC, lambda sink: _write_static(sink, array, table)),
        ]
    if alphabet == 2:
        candidates.append(
            Candidate(coded_bytes(_adaptive_bits(array)), Code.ADAPTIVE, lambda sink: _write_adaptive(sink, array))
        )
    if given is not None:
        cross = sum(float(part.sum()) for part in _surprises(array, given))
        entropy = min(entropy, cross)
        candidates.append(Candidate(coded_bytes(cross), Code.GIVEN, lambda sink: _write_given(sink, array, given)))
    write_shortest(sink, candidates, ideal_bits=entropy)


def read_symbols(source: Source, size: int, alphabet: int, *, given: Tensor | None = None) -> Tensor:
    """`size` symbols in [0, alphabet), as uint8 if they fit, else int32."""
    (code,) = source.read(1)
    dtype = np.uint8 if alphabet <= 256 else np.int32
    symbols: npt.NDArray[Any]
    if code == Code.PACKED:
        symbols = _read_packed(source, size, alphabet, dtype)
    elif code == Code.CONSTANT:
        symbols = np.full(size, source.read_uint(alphabet - 1), dtype)
    elif code == Code.STATIC:
        symbols = _read_static(source, size, alphabet, dtype)
    elif code == Code.ADAPTIVE and alphabet == 2:
        symbols = _read_adaptive(source, size)
    elif code == Code.GIVEN and given is not None:
        symbols = _read_given(source, given)
    else:
        raise PayloadError("coder", f"symbols in code {code}, which has no meaning here")
    return torch.from_numpy(symbols)


def write_indices(sink: Sink, index: Indices, size: int) -> None:
    """Write a set of indices below `size`, in increasing order: as gaps between them (up to a quarter), or as a bitmap.

    Gaps of a random set are geometric. A gap's lowest bits are all but uniform and are sent as such; its upper part has
    a geometric distribution that both ends know (from the number of indices), or a table where that is shorter.
    """
    count = len(index)
    if not 0 < count < size:
        return
    shift = _gap_shift(count, size)
    gaps = np.diff(index, prepend=-1) - 1
    low, high = (gaps & ((1 << shift) - 1)).astype(np.int32), gaps >> shift
    escapes, high = high // _ESCAPE, high % _ESCAPE
    steps = np.full(count + int(escapes.sum()), _ESCAPE, np.int32)
    steps[np.arange(count) + np.cumsum(escapes)] = high
    counts = np.bincount(steps, minlength=_ESCAPE + 1)
    present = np.flatnonzero(counts)
    table = table_of(counts[: present[-1] + 1])

    def gap_code(code: IndexCode, probabilities: Probabilities, table_bytes: int) -> Candidate:
        bits = shift * count - float(counts[present] @ np.log2(np.maximum(probabilities, 2.0**-24)))

        def write(sink: Sink) -> None:
            if code == IndexCode.TABLE:
                sink.write_uint(len(table))
                sink.write(table.tobytes())
            sink.write_uint(len(steps) - count)
            coder = constriction.stream.stack.AnsCoder()
            if shift:
                coder.encode_reverse(low, constriction.stream.model.Uniform(1 << shift))
            used = steps if code == IndexCode.GEOMETRIC else ranks_of(steps, table)
            coder.encode_reverse(used, _gap_model(code, table, count, size, shift))
            write_words(sink, coder.get_compressed())

        return Candidate(table_bytes + coded_bytes(bits), code, write)

    candidates = []
    if 4 * count <= size:
        candidates.append(gap_code(IndexCode.GEOMETRIC, _geometric(count, size, shift)[present], 1))
    if 4 * count <= size and len(present) > 1:
        candidates.append(gap_code(IndexCode.TABLE, probabilities_of(table)[1], 2 + len(table)))
    if 16 * count >= size:  # for fewer indices a bitmap is never shorter, and looking at all of it takes time
        bitmap = torch.zeros(size, dtype=torch.uint8)
        bitmap[torch.from_numpy(index)] = 1
        draft = Sink()
        write_symbols(draft, bitmap, 2)
        coded = draft.getvalue()
        candidates.append(Candidate(len(coded), IndexCode.BITMAP, lambda sink: sink.write(coded)))
    write_shortest(sink, candidates, ideal_bits=log2_choose(size, count))


def read_indices(source: Source, count: int, size: int) -> Indices:
    """`count` indices below `size`, in increasing order."""
    if count == size:
        return np.arange(size)
    if not count:
        return np.zeros(0, np.int64)
    (code,) = source.read(1)
    if code == IndexCode.BITMAP:
        ones = np.flatnonzero(read_symbols(source, size, 2).numpy())
        if len(ones) != count:
            raise PayloadError("count", f"a bitmap of {len(ones)} indices, but {count} were expected")
        return ones
    if code not in (IndexCode.GEOMETRIC, IndexCode.TABLE) or 4 * count > size:
        raise PayloadError("coder", f"indices in code {code}, which has no meaning here")
    shift = _gap_shift(count, size)
    table = source.array(source.read_uint(_ESCAPE + 1)) if code == IndexCode.TABLE else np.zeros(0, np.uint8)
    total = count + source.read_uint((size >> shift) // _ESCAPE)
    with guarded():
        coder = constriction.stream.stack.AnsCoder(read_words(source))
        model = _gap_model(IndexCode(code), table, count, size, shift)
        steps = coder.decode(model, total)
        low = coder.decode(constriction.stream.model.Uniform(1 << shift), count) if shift else np.zeros(count, np.int32)
        check_empty(coder)
    if code == IndexCode.TABLE:
        steps = np.take(np.flatnonzero(table).astype(np.int32), steps)
    ends = steps < _ESCAPE
    if np.count_nonzero(ends) != count or not ends[-1]:
        raise PayloadError("count", f"{np.count_nonzero(ends)} indices, but {count} were expected")
    index: Indices = np.cumsum(steps, dtype=np.int64)
    index = index if total == count else index[ends]
    index <<= shift
    low += 1
    index += np.cumsum(low, dtype=np.int64)
    index -= 1
    if index[-1] >= size:
        raise PayloadError("index", f"an index of {index[-1]}, but there are only {size} values")
    return index


def log2_choose(size: int, count: int) -> float:
    """log2 of the number of sets of `count` indices below `size`: what they are worth if all are equally likely."""
    return (math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)) / math.log(2)


# --- the codes ----------------------------------------------------------------------------------------------------


def write_shortest(sink: Sink, candidates: list[Candidate], *, ideal_bits: float) -> None:
    """Write the byte of the shortest code, and the code; all of it is worth `ideal_bits`."""
    shortest = min(candidates, key=lambda candidate: candidate.num_bytes)
    before = sink.ideal_bits
    sink.write(bytes([shortest.code]))
    shortest.write(sink)
    sink.ideal_bits = before + ideal_bits


def _width(alphabet: int) -> int:
    return (alphabet - 1).bit_length()


def _write_packed(sink: Sink, symbols: Symbols, alphabet: int) -> None:
    for plane in range(_width(alphabet)):
        sink.write(np.packbits(symbols >> plane & 1 if alphabet > 2 else symbols, bitorder="little").tobytes())


def _read_packed(source: Source, size: int, alphabet: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    if alphabet == 2:
        return unpack_bits(source.array(-(-size // 8)), size)
    symbols = np.zeros(size, dtype)
    for plane in range(_width(alphabet)):
        symbols |= unpack_bits(source.array(-(-size // 8)), size).astype(dtype) << plane
    if int(symbols.max()) >= alphabet:
        raise PayloadError("symbol", f"a symbol of {int(symbols.max())}, but there are only {alphabet}")
    return symbols


def _write_static(sink: Sink, symbols: Symbols, table: npt.NDArray[np.uint8]) -> None:
    sink.write(table.tobytes())
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(ranks_of(symbols, table), categorical(probabilities_of(table)[1]))
    write_words(sink, coder.get_compressed())


def _read_static(source: Source, size: int, alphabet: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    present, probabilities = probabilities_of(source.array(alphabet))
    symbols = np.empty(size, dtype)
    with guarded():
        coder = constriction.stream.stack.AnsCoder(read_words(source))
        model = categorical(probabilities)
        for part in _slices(size):
            ranks = coder.decode(model, part.stop - part.start)
            symbols[part] = ranks if len(present) == alphabet else np.take(present, ranks)
        check_empty(coder)
    return symbols


def _write_adaptive(sink: Sink, bits: Symbols) -> None:
    coder = constriction.stream.queue.RangeEncoder()
    ones = total = 0
    for block in np.split(bits, range(_BLOCK, len(bits), _BLOCK)):
        coder.encode(block.astype(np.int32), bernoulli((2 * ones + 1) / (2 * total + 2)))
        ones, total = _adapted(ones, total, int(block.sum()), len(block))
    write_words(sink, coder.get_compressed())


def _read_adaptive(source: Source, size: int) -> npt.NDArray[np.uint8]:
    bits = np.empty(size, np.uint8)
    ones = total = 0
    with guarded():
        coder = constriction.stream.queue.RangeDecoder(read_words(source))
        for start in range(0, size, _BLOCK):
            block = bits[start : start + _BLOCK]
            block[:] = coder.decode(bernoulli((2 * ones + 1) / (2 * total + 2)), len(block))
            ones, total = _adapted(ones, total, int(block.sum()), len(block))
        if not coder.maybe_exhausted():
            raise PayloadError("symbols", "more coded bits than symbols")
    return bits


def _adaptive_bits(bits: Symbols) -> float:
    whole = len(bits) - len(bits) % _BLOCK
    sums = bits[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.uint32).tolist()
    cost, ones, total = 0.0, 0, 0
    for block_ones, block in zip(
        [*sums, int(bits[whole:].sum())], [_BLOCK] * len(sums) + [len(bits) - whole], strict=True
    ):
        probability = (2 * ones + 1) / (2 * total + 2)
        cost -= block_ones * math.log2(probability) + (block - block_ones) * math.log2(1 - probability)
        ones, total = _adapted(ones, total, block_ones, block)
    return cost


def _adapted(ones: int, total: int, new_ones: int, new_total: int) -> tuple[int, int]:
    if total >= _BLOCK * _MEMORY:
        ones, total = ones - ones // _MEMORY, total - total // _MEMORY
    return ones + new_ones, total + new_total


def _write_given(sink: Sink, bits: Symbols, given: Tensor) -> None:
    coder = constriction.stream.stack.AnsCoder()
    model = constriction.stream.model.Bernoulli(perfect=False)
    for part in reversed(_slices(len(bits))):
        coder.encode_reverse(bits[part].astype(np.int32), model, _clipped(given[part]))
    write_words(sink, coder.get_compressed())


def _read_given(source: Source, given: Tensor) -> npt.NDArray[np.uint8]:
    bits = np.empty(len(given), np.uint8)
    model = constriction.stream.model.Bernoulli(perfect=False)
    with guarded():
        coder = constriction.stream.stack.AnsCoder(read_words(source))
        for part in _slices(len(bits)):
            bits[part] = coder.decode(model, _clipped(given[part]))
        check_empty(coder)
    return bits


def _surprises(bits: Symbols, given: Tensor) -> Iterator[Probabilities]:
    for part in _slices(len(bits)):
        probability = _clipped(given[part])
        yield -np.log2(np.where(bits[part], probability, 1 - probability))


def _slices(size: int) -> list[slice]:
    return [slice(start, min(start + _SLICE, size)) for start in range(0, size, _SLICE)]


# --- probabilities ------------------------------------------------------------------------------------------------


def _counts(symbols: Symbols, alphabet: int) -> npt.NDArray[np.int64]:
    if alphabet == 2:
        ones = int(np.count_nonzero(symbols))
        return np.array([len(symbols) - ones, ones])
    return np.bincount(symbols, minlength=alphabet)


def table_of(counts: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """What symbols cost by their counts, in eighths of a bit and 1 more; 0 for one that does not occur."""
    table = np.zeros(len(counts), np.uint8)
    present = np.flatnonzero(counts)
    table[present] = np.minimum(np.rint(-8 * np.log2(counts[present] / counts.sum())), 254) + 1
    return table


def contexts_of(counts: Indices, most: int) -> npt.NDArray[np.uint8]:
    """The context of each level, given how often it occurs.

    Each level that occurs is a context. Where there are more than `most`, contexts are made of neighbouring levels,
    with about the same share of all n occurrences each: a level that has, in increasing order, the occurrences a to b
    belongs to the context ⌊most · (a + b) / 2n⌋.
    """
    present = np.flatnonzero(counts)
    at = np.arange(len(present))
    if len(present) > most:
        ends = np.cumsum(counts[present])
        at = (2 * ends - counts[present]) * most // (2 * ends[-1])
        at = np.cumsum(np.diff(at, prepend=at[0]) > 0)
    contexts = np.zeros(len(counts), np.uint8)
    contexts[present] = at
    return contexts


def probabilities_of(table: npt.NDArray[np.uint8]) -> tuple[Indices, Probabilities]:
    """The symbols that occur, and their probabilities, from a table of costs in eighths of a bit, 0 for none."""
    present = np.flatnonzero(table)
    if len(present) < 2:
        raise PayloadError("table", "a table of frequencies names at least two symbols")
    weights = _WEIGHTS[table[present] - 1]
    return present, weights / weights.sum()


def ranks_of(symbols: Symbols | npt.NDArray[np.int32], table: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Symbols as positions among those that occur."""
    if table.all():
        return symbols.astype(np.int32)
    return np.take((np.cumsum(table > 0) - 1).astype(np.int32), symbols)


def _geometric(count: int, size: int, shift: int) -> Probabilities:
    ratio = 1 - count / size
    for _ in range(shift):
        ratio *= ratio
    powers = np.cumprod(np.append(1.0, np.full(_ESCAPE, ratio)))
    powers[:_ESCAPE] *= 1 - ratio
    return powers


def _gap_shift(count: int, size: int) -> int:
    """How many bits of a gap are sent as they are: a step of about a tenth of the mean is fine enough."""
    return max(0, (size // count).bit_length() - 4)


def _gap_model(code: IndexCode, table: npt.NDArray[np.uint8], count: int, size: int, shift: int) -> Any:
    return categorical(_geometric(count, size, shift) if code == IndexCode.GEOMETRIC else probabilities_of(table)[1])


def categorical(probabilities: Probabilities) -> Any:
    """constriction's model of symbols with these probabilities."""
    return constriction.stream.model.Categorical(probabilities, perfect=False)


def bernoulli(probability: float) -> Any:
    """constriction's model of bits that are 1 with this probability."""
    return constriction.stream.model.Bernoulli(probability, perfect=False)


def _clipped(given: Tensor) -> Probabilities:
    return np.clip(given.numpy().astype(np.float64), _CLOSEST, 1 - _CLOSEST)


# --- constriction's words -----------------------------------------------------------------------------------------


def coded_bytes(bits: float) -> float:
    """About how many bytes coded words take, from the bits that their symbols cost."""
    return 4 + bits / 8 + 2


def write_words(sink: Sink, words: Words) -> None:
    """What constriction made, after its length."""
    sink.write_uint(len(words))
    sink.write(words.astype("<u4").tobytes())


def read_words(source: Source) -> Words:
    """What `write_words` wrote."""
    return np.frombuffer(source.read(4 * source.read_uint(source.left // 4)), "<u4").astype(np.uint32)


def check_empty(coder: Any) -> None:
    """Refuse a code of which something is left when all symbols are read."""
    if not coder.is_empty():
        raise PayloadError("symbols", "more coded bits than symbols")


@contextmanager
def guarded() -> Iterator[None]:
    """Nothing but `PayloadError` leaves, not even a panic of the Rust library, which is not an `Exception`."""
    try:
        yield
    except PayloadError:
        raise
    except Exception as error:
        raise PayloadError("symbols", f"no valid code: {error}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise PayloadError("symbols", f"no valid code: {error}") from None
