"""A reader of laconic's frames that has docs/wire.md and nothing else.

It shows that the page suffices, so it must not import laconic: numpy, constriction and the standard library will do.
What it needs to know belongs on the page; where the two disagree, mend the one that is wrong.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from statistics import NormalDist
from typing import Any

import constriction
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
DOWN, UP, BROADCAST = 0, 1, 0xFFFF_FFFF


class Refused(ValueError):
    """What the page says must be refused; `reason` is the code that it gives."""

    def __init__(self, reason: str, said: str = "") -> None:
        super().__init__(f"{said or 'refused'} [{reason}]")
        self.reason = reason


def refuse(reason: str, condition: bool) -> None:
    if condition:
        raise Refused(reason)


# --- the frame --------------------------------------------------------------------------------------------------------


def crc32c(data: bytes) -> int:
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFF_FFFF


def _crc_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)
    return crc


CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]


def open_frame(
    frame: bytes, *, direction: int, codec: int, round: int, client: int, fingerprint: bytes
) -> tuple[int, bytes]:
    """Weight and payload of a frame that passes all checks, in the page's order."""
    refuse("truncated", len(frame) < 40)
    magic, version, way, number, at, sender, run, weight, length, checksum = struct.unpack_from("<4sBBHII8sIQI", frame)
    payload = frame[40:]
    refuse("magic", magic != b"LACN")
    refuse("version", version != 1)
    refuse("truncated", len(payload) < length)
    refuse("trailing", len(payload) > length)
    refuse("checksum", checksum != crc32c(frame[:36] + payload))
    refuse("direction", way != direction)
    refuse("codec", number != codec)
    refuse("fingerprint", run != fingerprint)
    refuse("round", at != round)
    refuse("client", sender != client)
    refuse("weight", (weight == 0) != (direction == DOWN))
    return weight, payload


# --- keys -------------------------------------------------------------------------------------------------------------


def fold_in(key: bytes, *parts: int | str) -> bytes:
    for part in parts:
        folded = b"s" + part.encode() if isinstance(part, str) else b"i%d" % part
        key = hashlib.blake2b(key + folded, digest_size=16, person=b"laconic.key").digest()
    return key


def root_key(seed: int) -> bytes:
    return fold_in(bytes(16), "laconic", seed)


def round_key(root: bytes, round: int) -> bytes:
    return fold_in(root, "round", round)


def up_key(root: bytes, round: int, client: int) -> bytes:
    """The key of a message from a client."""
    return fold_in(round_key(root, round), "client", client, "up")


def down_key(root: bytes, round: int, client: int = BROADCAST) -> bytes:
    """The key of a message to a client, or to everyone."""
    return fold_in(round_key(root, round), "down", client)


def snapshot_key(root: bytes, round: int, client: int = BROADCAST) -> bytes:
    """The key of a full snapshot for a client, or for everyone."""
    return fold_in(round_key(root, round), "snapshot", client)


def raw(key: bytes, num_bytes: int) -> Array:
    """The first bytes of a key's stream."""
    philox = np.random.Philox(key=int.from_bytes(key, "little"))
    return philox.random_raw(-(-num_bytes // 8)).astype("<u8").view(np.uint8)[:num_bytes]


def words(key: bytes, size: int) -> Array:
    return raw(key, 4 * size).view("<u4")


def stream_bits(key: bytes, size: int) -> Array:
    return np.unpackbits(raw(key, -(-size // 8)), count=size, bitorder="little")


# --- specs and fingerprints -------------------------------------------------------------------------------------------

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1}
BYTES |= {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8}
CODED_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")


@dataclass(frozen=True)
class Leaf:
    """What a receiver knows of a leaf beforehand."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    length: Callable[[Mapping[str, Array]], int] | None = None
    exact: bool = False
    expected: Array | None = None
    held: Array | None = None
    bernoulli: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def quantized(self) -> bool:
        return "float" in self.dtype and not self.exact

    def resolved(self, known: Mapping[str, Array]) -> Leaf:
        """The leaf with its length, where that follows from others."""
        if self.length is None:
            return self
        length = self.length(known)
        refuse("length", not 0 <= length <= self.size)
        return Leaf((length,), self.dtype, exact=self.exact)


Spec = Mapping[str, Leaf]


def describe(spec: Spec) -> str:
    """The spec as text."""
    return ";".join(
        f"{name}:{leaf.dtype}[{'<=' if leaf.length else ''}{','.join(map(str, leaf.shape))}]"
        for name, leaf in spec.items()
    )


def canonical(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def fingerprint(*, model: str, method: str, settings: object, up: str, down: str, key: bytes) -> bytes:
    """The eight bytes of a run; `model` is `describe` of the model's spec, `key` the root key."""
    fields = {"model": model, "method": method, "settings": settings, "up": up, "down": down, "key": key.hex()}
    return hashlib.blake2b(canonical(fields), digest_size=8).digest()


# --- elements ---------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """The bytes of a payload that are not read yet."""

    data: bytes
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def read(self, size: int) -> bytes:
        refuse("truncated", size > self.left)
        self.at += size
        return self.data[self.at - size : self.at]

    def array(self, size: int, dtype: str = "u1") -> Array:
        return np.frombuffer(self.read(size * np.dtype(dtype).itemsize), np.dtype(dtype).newbyteorder("<"))

    def byte(self) -> int:
        return self.read(1)[0]

    def uint(self, limit: int) -> int:
        value = 0
        for place in range(10):
            group = self.byte()
            value |= (group & 0x7F) << 7 * place
            refuse("count", value > limit or (group == 0 and place > 0))
            if group < 0x80:
                return value
        raise Refused("count")

    def scale(self) -> np.float32:
        bits = self.read(4)
        value = np.frombuffer(bits, "<f4")[0]
        refuse("scale", any(bits) and not 2.0**-100 <= value <= 2.0**100)
        return np.float32(value)

    def bits(self, size: int) -> Array:
        packed = self.array(-(-size // 8))
        refuse("padding", bool(size % 8 and packed[-1] >> size % 8))
        return np.unpackbits(packed, count=size, bitorder="little")

    def coded_words(self) -> Array:
        return self.array(self.uint(self.left // 4), "u4").astype(np.uint32)

    def coded_bytes(self) -> Array:
        coded = self.read(self.uint(self.left))
        refuse("symbols", coded.endswith(b"\0"))
        return np.frombuffer(coded + bytes(-len(coded) % 4), "<u4").astype(np.uint32)


@contextmanager
def coding() -> Iterator[None]:
    """Whatever constriction refuses, by an exception or a panic of Rust's, is refused as `symbols`."""
    try:
        yield
    except Refused:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise Refused("symbols", str(error)) from None


@contextmanager
def ans(coded: Array) -> Iterator[Any]:
    """An `AnsCoder` that must be empty in the end."""
    with coding():
        coder = constriction.stream.stack.AnsCoder(coded)
        yield coder
        refuse("symbols", not coder.is_empty())


def bernoulli(*probability: float) -> Any:
    return constriction.stream.model.Bernoulli(*probability, perfect=False)


def categorical(probabilities: Array) -> Any:
    return constriction.stream.model.Categorical(probabilities, perfect=False)


def from_table(table: Array) -> tuple[Array, Array]:
    """Which symbols occur, and their probabilities."""
    occur = np.flatnonzero(table)
    refuse("table", len(occur) < 2)
    weights = np.array([round(2.0 ** (32 - (int(entry) - 1) / 8)) for entry in table[occur]], np.float64)
    return occur, weights / weights.sum()


def read_symbols(source: Source, n: int, alphabet: int) -> Array:
    code = source.byte()
    if code == 0:
        symbols = np.zeros(n, np.int64)
        for plane in range((alphabet - 1).bit_length()):
            symbols |= source.bits(n).astype(np.int64) << plane
        refuse("symbol", bool((symbols >= alphabet).any()))
        return symbols
    if code == 1:
        return np.full(n, source.uint(alphabet - 1))
    if code == 2:
        occur, probabilities = from_table(source.array(alphabet))
        with ans(source.coded_words()) as coder:
            return occur[coder.decode(categorical(probabilities), n)]
    if code == 3 and alphabet == 2:
        return read_adaptive(source, n)
    raise Refused("coder")


def read_adaptive(source: Source, n: int) -> Array:
    blocks, ones, total, coded = [], 0, 0, source.coded_words()
    with coding():
        coder = constriction.stream.queue.RangeDecoder(coded)
        for start in range(0, n, 1024):
            blocks.append(coder.decode(bernoulli((2 * ones + 1) / (2 * total + 2)), min(1024, n - start)))
            if total >= 8192:
                ones, total = ones - ones // 8, total - total // 8
            ones, total = ones + int(blocks[-1].sum()), total + len(blocks[-1])
        refuse("symbols", not coder.maybe_exhausted())
    return np.concatenate(blocks)


def read_indices(source: Source, k: int, d: int) -> Array:
    if k in (0, d):
        return np.arange(k)
    code = source.byte()
    if code == 0:
        index = np.flatnonzero(read_symbols(source, d, 2))
        refuse("count", len(index) != k)
        return index
    refuse("coder", code not in (1, 2) or 4 * k > d)
    m = max(0, (d // k).bit_length() - 4)
    if code == 1:
        ratio = 1 - k / d
        for _ in range(m):
            ratio *= ratio
        powers = [1.0]
        for _ in range(255):
            powers.append(powers[-1] * ratio)
        occur, probabilities = np.arange(256), np.array([power * (1 - ratio) for power in powers[:255]] + powers[255:])
        escapes = source.uint((d >> m) // 255)
    else:
        table = source.array(source.uint(256))
        escapes = source.uint((d >> m) // 255)
        occur, probabilities = from_table(table)
    with ans(source.coded_words()) as coder:
        steps = occur[coder.decode(categorical(probabilities), k + escapes)]
        low = coder.decode(constriction.stream.model.Uniform(1 << m), k) if m else np.zeros(k, np.int64)
    ends = steps < 255
    refuse("count", np.count_nonzero(ends) != k or not ends[-1])
    high = np.diff(np.cumsum(steps)[ends], prepend=0)
    index = np.cumsum((high << m) + low + 1) - 1
    refuse("index", bool(index[-1] >= d))
    return index


# --- stages -----------------------------------------------------------------------------------------------------------

Rest = Callable[..., Array]
Stage = Callable[[Source, int, bytes, Rest], Array]
"""Reads what the stage wrote, asks the rest for (size, alphabet) values or symbols, and gives `size` float32 values."""


def floats(dtype: str) -> Callable[[Source, int, int], Array]:
    def read(source: Source, n: int, alphabet: int) -> Array:
        return from_memory(source.read(n * BYTES[dtype]), dtype).astype(np.float32)

    return read


def rotate(bits: float, fraction: float = 1.0) -> Stage:
    def read(source: Source, d: int, key: bytes, rest: Rest) -> Array:
        sides = [1 << bit for bit in reversed(range(10, d.bit_length())) if d >> bit & 1]
        if last := d % 1024:
            sides.append(last if last <= 64 else 1 << (last - 1).bit_length())
        scales = [source.scale() for _ in sides]
        if not any(scales):
            return np.zeros(d, np.float32)
        # In double precision, so that only the last rounding is ours: the page leaves the order of sums open.
        index = kept(sides, fraction, fold_in(key, "kept"))
        values = np.zeros(sum(sides))
        values[index] = rounded(bits, len(index), fold_in(key, "bits"), rest)
        ends = np.cumsum(sides)
        for part, scale in zip(np.split(values, ends[:-1]), scales, strict=True):
            part *= float(scale)
        large, second = (sum(side for side in sides if 64 < side <= most) for most in (d + 1024, 4096))
        parts = dict(zip(zip(ends - sides, ends, strict=True), sides, strict=True))
        for of_step, begin in ((fold_in(key, "twice"), large - second), (key, 0)):
            for (low, high), side in parts.items():
                if side > 64 and low >= begin:
                    values[low:high] = hadamard(values[low:high]) / math.sqrt(side)
            values[begin:large] *= 1 - 2 * stream_bits(of_step, large - begin).astype(np.float64)
        values[large:] = uniform_rotation(len(values) - large, fold_in(key, "tiny")).T @ values[large:]
        return values[:d].astype(np.float32)

    return read


def kept(sides: list[int], fraction: float, key: bytes) -> Array:
    """Where the values are that are kept."""
    found = []
    for start, part in zip(
        np.cumsum([0, *sides]), np.split(words(key, sum(sides)), np.cumsum(sides)[:-1]), strict=False
    ):
        order = np.argsort(-part.astype(np.int64), kind="stable")
        found.append(start + np.sort(order[: max(1, math.floor(fraction * len(part) + 0.5))]))
    return np.concatenate(found)


def uniform_rotation(side: int, key: bytes) -> Array:
    """Gram–Schmidt, as the page has it, on the columns of a matrix of normal values."""
    u, v = (words(key, 2 * side * side).reshape(2, side, side) + 0.5) / 2**32
    columns = (np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)).T
    found: list[Array] = []
    for column in columns:
        for _ in range(2):  # once more, for what rounding left
            for q in found:
                column = column - (q @ column) * q
        found.append(column / np.linalg.norm(column))
    return np.array(found).reshape(side, side).T


def hadamard(x: Array) -> Array:
    """The product with the Hadamard matrix in natural order."""
    if len(x) == 1:
        return x
    a, b = (hadamard(half) for half in np.split(x, 2))
    return np.concatenate([a + b, a - b])


def scattered(index: Array, d: int, values: Array) -> Array:
    x = np.zeros(d, np.float32)
    x[index] = values
    return x


def top_k(fraction: float) -> Stage:
    def read(source: Source, d: int, key: bytes, rest: Rest) -> Array:
        index = read_indices(source, max(1, math.floor(fraction * d + 0.5)), d)
        return scattered(index, d, rest(len(index)))

    return read


def random_k(fraction: float) -> Stage:
    def read(source: Source, d: int, key: bytes, rest: Rest) -> Array:
        k = max(1, math.floor(fraction * d + 0.5))
        order = np.argsort(-words(key, d).astype(np.int64), kind="stable")
        return scattered(np.sort(order[:k]), d, rest(k))

    return read


def threshold(source: Source, d: int, key: bytes, rest: Rest) -> Array:
    index = read_indices(source, source.uint(d), d)
    return scattered(index, d, rest(len(index)))


def sign(step: float | None = None) -> Stage:
    def read(source: Source, d: int, key: bytes, rest: Rest) -> Array:
        scale = source.scale()
        refuse("scale", step is not None and scale not in (0, np.float32(step)))
        return np.where(rest(d, 2), -scale, scale) if scale else np.zeros(d, np.float32)

    return read


def levels(s: int) -> Stage:
    def read(source: Source, d: int, key: bytes, rest: Rest) -> Array:
        norm = source.scale()
        largest = source.uint(s) if norm else 0
        if not largest:
            return np.zeros(d, np.float32)
        level = (rest(d, 2 * largest + 1).astype(np.int64) - largest).astype(np.float32)
        return level * np.float32(float(norm) / s)

    return read


def low_rank(rank: int, rows: int) -> Stage:
    def read(source: Source, d: int, key: bytes, rest: Rest) -> Array:
        p, q = (rest(rank * side).reshape(rank, side) for side in (rows, d // rows))
        product = np.zeros((rows, d // rows), np.float32)
        for i in range(rank):
            product += np.multiply.outer(p[i], q[i])
        return product.reshape(-1)

    return read


def rounded(bits: float, d: int, key: bytes, rest: Rest) -> Array:
    fewer, values = math.floor(bits), np.zeros(d, np.float32)
    more = words(key, d) < math.floor(2**32 * (bits - fewer)) if fewer < bits else np.zeros(d, bool)
    for group, width in ((~more, fewer), (more, fewer + 1)):
        if group.any():
            values[group] = centroids(width)[rest(int(group.sum()), 1 << width)]
    return values


@functools.cache
def centroids(bits: int) -> Array:
    """The 2^bits values c = E[X | cell of c] of N(0, 1), by Newton's method on the positive half."""
    half = 1 << bits - 1
    c = np.array([math.sqrt(3) * NormalDist().inv_cdf(0.5 + (i + 0.5) / (2 * half)) for i in range(half)])
    for _ in range(20):
        edges = np.array([0.0, *(c[1:] + c[:-1]) / 2, math.inf])
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        mass = -np.diff([math.erfc(edge / math.sqrt(2)) / 2 for edge in edges])
        mean = -np.diff(density) / mass
        edges[-1] = 0.0  # its density is 0: whatever stands here does not count
        by_low, by_high = density[:-1] * (mean - edges[:-1]) / mass, density[1:] * (edges[1:] - mean) / mass
        by_low[0] = 0.0  # the edge at 0 stays where it is
        slope = np.diag(1 - (by_low + by_high) / 2) - np.diag(by_low[1:] / 2, -1) - np.diag(by_high[:-1] / 2, 1)
        c = c - np.linalg.solve(slope, c - mean)
    return np.concatenate([-c[::-1], c]).astype(np.float32)


# --- lean -------------------------------------------------------------------------------------------------------------


def read_lean(source: Source, shapes: Sequence[tuple[int, ...]], size: int, key: bytes) -> Array:
    step = source.scale() if size else np.float32(0)
    if not step:
        return np.zeros(size, np.float32)
    kind = source.byte()
    refuse("coder", kind > 1)
    shrink = np.zeros(4, np.float32) if kind else np.array([0, *source.array(3, "i1")], np.float32)
    level = read_levels(source, shapes, size, words(fold_in(key, "dither"), size) >> 8 if kind else None)
    magnitude = abs(level).astype(np.float32) * np.float32(128) - shrink[np.minimum(abs(level), 3)]
    return np.asarray(np.sign(level).astype(np.float32) * (magnitude * (step / np.float32(128))))


class Frequencies:
    """Of the answers to each question, by context; the last question is that of signs."""

    def __init__(self, dithered: bool) -> None:
        odds = 2.0 ** ((np.arange(128) - 64) / 4)
        first, sign = odds / (1 + odds), odds
        if dithered:
            t = np.tile(2.0 ** ((np.arange(16) - 16.5) / 2) / 2, 128)
            near, far = np.exp(-t / odds.repeat(16)) / 2, np.exp(-(1 - t) / odds.repeat(16)) / 2
            first = near + far
            sign = near / np.maximum(first, 1e-300)
        whole = np.maximum(1, np.rint(2**19 * first)), np.maximum(1, np.rint(2**19 * sign))
        self.ones = [whole[0], *(np.full(128, 2.0**16) for _ in range(33)), whole[1]]
        self.zeros = [np.maximum(1, 2**19 - whole[0]), *(np.full(128, 3 * 2.0**16) for _ in range(33))]
        self.zeros.append(np.maximum(1, 2**19 - whole[1]))

    def answers(self, coder: Any, question: int, contexts: Array) -> Array:
        ones, zeros = self.ones[question], self.zeros[question]
        yes = coder.decode(bernoulli(), (ones / (ones + zeros))[contexts]) == 1
        np.add.at(ones, contexts[yes], 2**16)
        np.add.at(zeros, contexts[~yes], 2**16)
        return np.asarray(yes)


class Seen:
    """Sums of tokens and numbers of values, of groups; `of` is the group of each value."""

    def __init__(self, of: Array, parent: Array) -> None:
        self.of, self.parent = of, parent
        self.sums, self.numbers = (np.zeros(int(of.max()) + 1) for _ in range(2))

    def add(self, values: Array, tokens: Array) -> None:
        np.add.at(self.sums, self.of[values], np.minimum(tokens, 15))
        np.add.at(self.numbers, self.of[values], 1)

    def means(self, of_parents: Array) -> Array:
        return (self.sums + 0.5) / (self.numbers + 0.5 / of_parents[self.parent])


def groups_of(shapes: Sequence[tuple[int, ...]]) -> list[Seen]:
    """All values; leaves, rows, channels and columns, each with the number of the group that it is part of."""
    of: list[list[int]] = [[], [], [], [], []]
    parents: list[list[int]] = [[0], [], [], [], []]
    for leaf in (shape for shape in shapes if math.prod(shape)):
        high, deep, wide = (leaf[0], leaf[1], math.prod(leaf[1:])) if len(leaf) > 1 else (1, 1, 1)
        each = wide if len(leaf) > 1 else math.prod(leaf)
        starts = [len(known) for known in parents]
        parents[1].append(0)
        parents[2] += [starts[1]] * high
        parents[3] += [starts[1]] * deep
        parents[4] += [starts[3] + column * deep // wide for column in range(wide)]
        for value in range(math.prod(leaf)):
            column = value % each if len(leaf) > 1 else 0
            numbers = (0, starts[1], starts[2] + value // each, starts[3] + column * deep // wide, starts[4] + column)
            for known, number in zip(of, numbers, strict=True):
                known.append(number)
    return [Seen(np.array(a), np.array(b)) for a, b in zip(of, parents, strict=True)]


def phases_of(size: int) -> list[Array]:
    ends = [2**32]
    while size * (2 * ends[0] // 3) >= 256 * 2**32:
        ends.insert(0, 2 * ends[0] // 3)
    phases: list[list[int]] = [[] for _ in ends]
    for value in range(size):
        h = value * 0x9E3779B1 % 2**32
        h = (h ^ h >> 15) * 0x85EBCA77 % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE3D % 2**32
        h ^= h >> 16
        phases[next(phase for phase, end in enumerate(ends) if h < end)].append(value)
    return [np.array(phase, np.int64) for phase in phases]


def read_levels(source: Source, shapes: Sequence[tuple[int, ...]], size: int, draws: Array | None) -> Array:
    tokens = np.zeros(size, np.int64)
    if not (first := source.byte()):
        return tokens
    phases, (whole, leaves, rows, channels, columns) = phases_of(size), groups_of(shapes)
    order = np.concatenate(phases)
    frequencies = Frequencies(draws is not None)
    reach, negative = np.zeros(size, np.int64), np.zeros(size, np.int64)
    if draws is not None:
        steps = [round(2**23 * 2 ** (j / 2 - 8)) for j in range(1, 16)]
        for place, draw in zip(order, draws.tolist(), strict=True):
            reach[place] = sum((2**24 - draw if draw >= 2**23 else draw) > step for step in steps)
            negative[place] = draw < 2**23
    with ans(source.coded_words()) as coder:
        for phase in phases:
            mean = whole.means(np.array([2.0 ** ((first - 128) / 8)]))
            of_leaves = leaves.means(mean)
            of_rows, of_columns = rows.means(of_leaves), columns.means(channels.means(of_leaves))
            by_row = np.rint(8 * np.log2(of_rows / of_leaves[rows.parent])).astype(np.int64)
            by_column = np.rint(8 * np.log2(of_columns / mean[0])).astype(np.int64)
            score = by_row[rows.of[phase]] + by_column[columns.of[phase]] + first
            asked, contexts = phase, np.clip(score // 2, 0, 127)
            for question in range(34):
                fine = contexts * 16 + reach[asked] if draws is not None and not question else contexts
                yes = frequencies.answers(coder, question, fine)
                asked, contexts = asked[yes], contexts[yes]
                if not question:
                    contexts = contexts // 5 * 5
                    if draws is not None:
                        negative[asked] ^= 1 - frequencies.answers(coder, 34, fine[yes]).astype(np.int64)
                tokens[asked] += 1
                if not len(asked):
                    break
            for groups in (whole, leaves, rows, channels, columns):
                groups.add(phase, tokens[phase])
        levels = tokens.copy()
        for token in range(16, 35):
            at = order[tokens[order] == token]
            if len(at):
                low = coder.decode(constriction.stream.model.Uniform(1 << (token - 12)), len(at))
                levels[at] = low.astype(np.int64) + (1 << (token - 12))
    loud = order[levels[order] > 0]
    refuse("symbols", not len(loud))
    if draws is None:
        negative[loud] = source.bits(len(loud))
    levels[loud] *= 1 - 2 * negative[loud]
    return levels


# --- codecs -----------------------------------------------------------------------------------------------------------

NUMBERS = {"float32": 1, "float16": 2, "bfloat16": 3, "signsgd": 16, "signsgd_mv": 17, "terngrad": 18, "qsgd": 19}
NUMBERS |= {"int8": 20, "drive": 35, "drive_mse": 36, "eden": 37, "topk": 48, "randk": 49, "threshold": 50, "mask": 65}
NUMBERS |= {"by_leaf": 66, "mrc": 67, "lowrank": 80, "lean": 96}
CHAIN = 64


@dataclass(frozen=True)
class Codec:
    """What a codec's text stands for."""

    number: int
    stages: tuple[Stage, ...] = ()
    coder: Callable[[Source, int, int], Array] = field(default=read_symbols)
    per_leaf: bool = False
    mask: bool = False
    index_bits: int = 0
    """Of an index of `mrc`."""
    rank: int = 0
    """That of the stage low rank, which comes before all others, and only on leaves that it makes shorter."""
    lean: bool = False
    routes: tuple[tuple[str, Codec], ...] = ()
    """Patterns and their codecs, of `by_leaf`."""

    def stages_for(self, shape: tuple[int, ...]) -> tuple[Stage, ...]:
        """The stages of a leaf, or of a vector of several."""
        rows, columns = math.prod(shape[:1]), math.prod(shape[1:])
        if self.rank and self.rank * (rows + columns) < rows * columns:
            return (low_rank(self.rank, rows), *self.stages)
        return self.stages

    def route(self, name: str) -> int:
        """The number of the first pattern that matches."""
        return next(number for number, (pattern, _) in enumerate(self.routes) if fnmatchcase(name, pattern))


def parse(text: str) -> Codec:
    if wrapped := re.fullmatch(r"ef\((.*)\)", text):
        return parse(wrapped[1])
    if wrapped := re.fullmatch(r"by_leaf\((.*)\)", text):
        routes = (route.split(": ", 1) for route in split_routes(wrapped[1]))
        return Codec(NUMBERS["by_leaf"], routes=tuple((pattern, parse(codec)) for pattern, codec in routes))
    first, *others = (_parse_one(part.strip()) for part in text.split("|"))
    for then in others:
        stages, per_leaf = first.stages + then.stages, first.per_leaf or then.per_leaf
        index_bits = first.index_bits or then.index_bits
        first = Codec(CHAIN, stages, then.coder, per_leaf, first.mask or then.mask, index_bits, first.rank or then.rank)
    return first


def split_routes(text: str) -> list[str]:
    """What stands between the commas that a space follows, of those outside all parentheses."""
    routes, depth = [""], 0
    for piece in re.split(r"(, |[()])", text):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == ", " and not depth:
            routes.append("")
        else:
            routes[-1] += piece
    return routes


def _parse_one(text: str) -> Codec:
    name, _, given = text.partition(":")
    settings = dict(pair.split("=") for pair in given.split(",")) if given else {}
    number, per_leaf = NUMBERS[name], settings.get("per_leaf") == "true"
    if name in ("float32", "float16", "bfloat16"):
        return Codec(number, coder=floats(name))
    if name == "lean":
        return Codec(number, lean=True)
    if name == "mask":
        return Codec(number, coder=floats("float32"), mask=True)
    if name == "mrc":
        return Codec(number, coder=floats("float32"), mask=True, index_bits=int(settings.get("bits", 8)))
    if name == "lowrank":
        return Codec(number, coder=floats("float32"), per_leaf=True, rank=int(settings["rank"]))
    if name in ("topk", "randk", "threshold"):
        fraction = float(settings.get("fraction", 1))
        stage = {"topk": top_k(fraction), "randk": random_k(fraction), "threshold": threshold}[name]
        return Codec(number, (stage,), floats("float32"), per_leaf)
    if name == "eden":
        bits = float(settings["bits"])
        return Codec(number, (rotate(max(bits, 1.0), min(bits, 1.0)),), per_leaf=per_leaf)
    if name in ("drive", "drive_mse"):
        return Codec(number, (rotate(1.0),), per_leaf=per_leaf)
    if name in ("signsgd", "signsgd_mv"):
        step = float(settings.get("step", 0.001)) if name == "signsgd_mv" else 1.0
        known = name == "signsgd_mv" or settings.get("scale") == "unit"
        return Codec(number, (sign(step if known else None),), per_leaf=per_leaf)
    s = {"terngrad": 1, "int8": 127}.get(name) or int(settings["levels"])
    return Codec(number, (levels(s),), per_leaf=per_leaf)


# --- payloads ---------------------------------------------------------------------------------------------------------


@np.errstate(over="ignore", invalid="ignore")  # what overflows is infinite or NaN, and that is looked for
def decode(text: str, payload: bytes, spec: Spec, key: bytes) -> dict[str, Array]:
    """The leaves of a payload, in the order of the spec; those of type bfloat16 come as float32."""
    return read_payload(parse(text), payload, spec, key, {})


def read_change(
    text: str, payload: bytes, spec: Spec, key: bytes, held: Mapping[str, Array]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """What a receiver has after a change from what it holds, and what it holds then (leaves of one name and shape)."""
    exact = text.split(":")[0] == "signsgd_mv" or text in ("topk:fraction=1", "randk:fraction=1", "threshold:level=0")
    moved = [name for name, leaf in spec.items() if leaf.quantized]
    scale = np.float32(1)
    if moved and not exact:
        refuse("truncated", len(payload) < 4)
        scale, payload = np.frombuffer(payload[:4], "<f4")[0], payload[4:]
        refuse("non_finite", not np.isfinite(scale))
    received = decode(text, payload, spec, key)
    for name in moved:
        begins = held[name] if name in held and held[name].shape == received[name].shape else np.float32(0)
        received[name] = scale * received[name] + begins
    return received, {**held, **received}


def read_payload(codec: Codec, payload: bytes, spec: Spec, key: bytes, known: Mapping[str, Array]) -> dict[str, Array]:
    """The leaves of the spec; `known` are others from which lengths may follow."""
    source = Source(payload)
    tree = (
        read_routes(codec, source, spec, key, known) if codec.routes else read_leaves(codec, source, spec, key, known)
    )
    refuse("trailing", source.left > 0)
    return {name: tree[name] for name in spec}


def read_routes(codec: Codec, source: Source, spec: Spec, key: bytes, known: Mapping[str, Array]) -> dict[str, Array]:
    numbers = {name: codec.route(name) for name in spec}
    exact = [name for name, leaf in spec.items() if not leaf.quantized]
    others = sorted((name for name, leaf in spec.items() if leaf.quantized), key=lambda name: numbers[name])
    tree: dict[str, Array] = {}
    for names in (exact, others):
        for number, part in itertools.groupby(names, key=lambda name: numbers[name]):
            leaves, payload = {name: spec[name] for name in part}, source.read(source.uint(source.left))
            tree |= read_payload(codec.routes[number][1], payload, leaves, fold_in(key, number), {**known, **tree})
    return tree


def read_leaves(codec: Codec, source: Source, spec: Spec, key: bytes, known: Mapping[str, Array]) -> dict[str, Array]:
    tree = read_drawn(source, spec, key, codec.index_bits) if codec.index_bits else {}
    others = {name: leaf for name, leaf in spec.items() if name not in tree}
    tree |= read_exact(source, others, {**known, **tree}, mask=codec.mask)
    exact = {**known, **tree}
    quantized = {name: leaf.resolved(exact) for name, leaf in spec.items() if leaf.quantized}
    parts = [(key, quantized)]
    if codec.per_leaf:
        parts = [(fold_in(key, name), {name: leaf}) for name, leaf in quantized.items()]
    for part_key, leaves in parts:
        size = sum(leaf.size for leaf in leaves.values())
        shape = next(iter(leaves.values())).shape if codec.per_leaf else (size,)
        if codec.lean:
            vector = read_lean(source, [leaf.shape for leaf in leaves.values()], size, part_key)
        else:
            vector = read_vector(codec.coder, codec.stages_for(shape), source, part_key, size)
        refuse("non_finite", not np.isfinite(vector).all())
        for name, leaf in leaves.items():
            values, vector = vector[: leaf.size], vector[leaf.size :]
            tree[name] = to_type(values, leaf.dtype).reshape(leaf.shape)
    return tree


def read_vector(
    coder: Callable[[Source, int, int], Array],
    stages: tuple[Stage, ...],
    source: Source,
    key: bytes,
    size: int,
    alphabet: int = 0,
    depth: int = 0,
) -> Array:
    if not size:
        return np.zeros(0, np.float32)
    if depth == len(stages):
        return coder(source, size, alphabet)
    handed_on = itertools.count()

    def rest(size: int, alphabet: int = 0) -> Array:
        number = next(handed_on)
        next_key = fold_in(key, "again", number) if number else key
        return read_vector(coder, stages, source, next_key, size, alphabet, depth + 1)

    return stages[depth](source, size, fold_in(key, depth), rest)


def from_memory(data: bytes, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)


def to_type(values: Array, dtype: str) -> Array:
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000).view(np.float32)


def read_exact(source: Source, spec: Spec, known: Mapping[str, Array], *, mask: bool) -> dict[str, Array]:
    tree = read_bits(source, {n: leaf for n, leaf in spec.items() if leaf.dtype == "bool"}) if mask else {}
    for name, leaf in spec.items():
        if leaf.quantized or name in tree:
            continue
        leaf = leaf.resolved({**known, **tree})
        if leaf.dtype == "bool":
            values = source.bits(leaf.size).astype(bool)
        elif mask and leaf.dtype in CODED_INTEGERS and leaf.size >= 16:
            values = read_integers(source, leaf)
        else:
            values = from_memory(source.read(leaf.size * BYTES[leaf.dtype]), leaf.dtype)
        refuse("non_finite", "float" in leaf.dtype and not np.isfinite(values).all())
        tree[name] = values.reshape(leaf.shape)
    return tree


# --- mrc --------------------------------------------------------------------------------------------------------------


def read_drawn(source: Source, spec: Spec, key: bytes, b: int) -> dict[str, Array]:
    """The Bernoulli leaves: of the candidates of each block, the one that its index names."""
    leaves = {name: leaf for name, leaf in spec.items() if leaf.bernoulli}
    if not sum(leaf.size for leaf in leaves.values()):
        return {name: np.zeros(leaf.shape, bool) for name, leaf in leaves.items()}
    level = np.where(levels_of(leaves) == 0, 32768, levels_of(leaves))
    context = np.unique(contexts(level), return_inverse=True)[1]
    sizes, sums = np.bincount(context), np.bincount(context, level).astype(np.int64)
    blocks = [source.uint(n) for n in sizes.tolist()]
    refuse("count", any(B and n > B * 4096 for B, n in zip(blocks, sizes.tolist(), strict=True)))
    index = source.bits(b * sum(blocks)).reshape(-1, b).astype(np.int64) @ 2 ** np.arange(b)
    parts = np.split(index, np.cumsum(blocks)[:-1])
    bits = np.empty(len(level), bool)
    for number, (n, total, B, x) in enumerate(zip(sizes.tolist(), sums.tolist(), blocks, parts, strict=True)):
        prior, i = (131072 * total + 65535 * n) // (131070 * n), np.arange(n)
        group = functools.partial(fold_in, key, "candidates", number)
        if B:
            halves = [raw(group(g), 2 * -(-n // B) << b).view("<u2") for g in range(-(-B // 1024))]
            half = np.stack(halves).reshape(len(halves), -1, 1 << b)[i % B // 1024, i // B, x[i % B]]
        else:
            half = raw(group(0), 2 * n).view("<u2")
        bits[context == number] = half < prior
    cut = np.split(bits, np.cumsum([leaf.size for leaf in leaves.values()])[:-1])
    return {name: part.reshape(leaf.shape) for (name, leaf), part in zip(leaves.items(), cut, strict=True)}


# --- mask -------------------------------------------------------------------------------------------------------------


def read_integers(source: Source, leaf: Leaf) -> Array:
    code, most = source.byte(), min(65535, int(np.iinfo(leaf.dtype).max))
    if code == 0:
        return from_memory(source.read(leaf.size * BYTES[leaf.dtype]), leaf.dtype)
    if code == 1:
        return read_symbols(source, leaf.size, source.uint(most) + 1).astype(leaf.dtype)
    held = leaf.held
    refuse("coder", code > 2 or held is None or (held.shape, str(held.dtype)) != (leaf.shape, leaf.dtype))
    assert held is not None
    held = held.reshape(-1).astype(np.int64)
    refuse("coder", held.min() < 0 or held.max() > 65535)
    values = read_given_held(source, held)
    refuse("symbol", values.min() < 0 or values.max() > most)
    return values.astype(leaf.dtype)


def read_given_held(source: Source, held: Array) -> Array:
    changes, most = source.byte(), source.byte()
    refuse("coder", changes > 1 or not 1 <= most <= 64)
    z, alphabet = source.uint(131071), source.uint(131070) + 1
    context = contexts(held, most)
    sizes = np.unique(context, return_counts=True)[1].tolist()
    tables = source.array(alphabet * len(sizes)).reshape(-1, alphabet)
    groups = []
    with ans(source.coded_words()) as coder:
        for size, table in zip(sizes, tables, strict=True):
            if np.count_nonzero(table) == 1:
                groups.append(np.full(size, np.flatnonzero(table)[0]))
            else:
                occur, probabilities = from_table(table)
                groups.append(occur[coder.decode(categorical(probabilities), size)])
    symbols = np.empty(len(held), np.int64)
    symbols[np.argsort(context, kind="stable")] = np.concatenate(groups)
    return symbols + (z // 2 if z % 2 == 0 else -(z + 1) // 2) + changes * held


def read_bits(source: Source, leaves: Spec) -> dict[str, Array]:
    sizes = [leaf.size for leaf in leaves.values()]
    bits = _read_bits(source, leaves, sizes) if sum(sizes) else np.zeros(0, np.uint8)
    parts = np.split(bits.astype(bool), np.cumsum(sizes)[:-1]) if sizes else []
    return {name: part.reshape(leaf.shape) for (name, leaf), part in zip(leaves.items(), parts, strict=True)}


def _read_bits(source: Source, leaves: Spec, sizes: list[int]) -> Array:
    code, n = source.byte(), sum(sizes)
    expected = any(leaf.expected is not None for leaf in leaves.values())
    if code == 0:
        return source.bits(n)
    if code == 1:
        return read_groups(source, [n])
    if code == 2 and len(sizes) > 1:
        return read_groups(source, [size for size in sizes if size])
    if code == 3 and expected:
        context = contexts(levels_of(leaves))
        bits = np.empty(n, np.uint8)
        bits[np.argsort(context, kind="stable")] = read_groups(source, np.unique(context, return_counts=True)[1])
        return bits
    if code == 4 and expected:
        level = levels_of(leaves)
        with ans(source.coded_bytes()) as coder:
            return coder.decode(bernoulli(), np.where(level > 0, level / 65535, 0.5))
    raise Refused("coder")


def levels_of(leaves: Spec) -> Array:
    """What is expected of each bit, in 65535ths."""
    parts = []
    for leaf in leaves.values():
        level = np.zeros(leaf.size, np.float32)
        if leaf.expected is not None:
            product = leaf.expected.astype(np.float32).reshape(-1) * np.float32(65535)
            level = np.clip(np.rint(product), 1, 65534)
        parts.append(level.astype(np.int64))
    return np.concatenate(parts)


def contexts(level: Array, most: int = 64) -> Array:
    """The number of each bit's context; only its order among the others counts."""
    _, rank, counts = np.unique(level, return_inverse=True, return_counts=True)
    if len(counts) <= most:
        return rank
    before = np.cumsum(counts) - counts
    return (most * (2 * before + counts) // (2 * len(level)))[rank]


def read_groups(source: Source, sizes: Any) -> Array:
    frequencies = source.array(len(sizes), "u2").tolist()
    groups = []
    with ans(source.coded_bytes()) as coder:
        for size, f in zip(map(int, sizes), frequencies, strict=True):
            certain = f in (0, 65535)
            groups.append(np.full(size, f > 0) if certain else coder.decode(bernoulli(f / 65535), size))
    return np.concatenate(groups).astype(np.uint8)
