"""Minimal random coding: bits that are as good as drawn from the sender's probabilities, in about as many bits as these
tell beyond what both ends expect.

| symbol | here |
|---|---|
| q | the sender's probability of a bit to be 1 |
| p | what both ends expect of it (`Shared.expected`), the same for all bits of a context |
| b, M = 2^b; κ | `bits` of an index, and candidates; `kl`, the bits of divergence that a block carries |
| B, n | blocks of a context, and bits of a block |

Whoever wants the receiver to have *a* draw of Bern(q), whichever, need not send one. Both ends make M candidates
x ~ Bern(p) for a block from their key; the sender takes one with probability proportional to q(x)/p(x), by the largest
of ℓ(x) = Σ x·(logit q − logit p) + Gumbel noise, and sends its number in b bits. That is nearly a draw from q as long
as the divergence KL(q‖p) of the block is well below b: so a context gets B = KL/κ blocks, rounded by chance, and the
rate is KL·b/κ. Larger κ are cheaper and pull what is received towards p, a bias; q = p costs nothing.

Log-weights are fixed-point integers, of tables, and their sums are exact: the choice is the same on every machine.
Blocks of a context share their candidates by 1024, so that all sums are one matrix product; which bits make a block is
spread over the whole message.

Havasi, Peharz and Hernández-Lobato, "Minimal random code learning", 2019; Isik et al., "Adaptive compression in
federated learning via side information" (KLMS), 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laconic.codecs.entropy import Indices
from laconic.codecs.masks import Coded, Expectation, levels_of
from laconic.codecs.stream import Bytes, Sink, Source
from laconic.codecs.vector import unpack_bits
from laconic.core import (
    ConfigError,
    Key,
    Leaf,
    PayloadError,
    Shared,
    Spec,
    Tree,
    check_probabilities,
    cut,
)

Numbers = npt.NDArray[np.float32]
"""Integers of at most 2²⁴, so that sums of them are exact in whatever order."""
Parts = npt.NDArray[np.int64]
"""Probabilities in 65536ths."""

_ONE = 1 << 16  # probabilities are multiples of its inverse
_FIXED = 128  # steps of a log-weight to 1
_LONGEST = 4096  # bits of a block: candidates take memory, and sums stay below 2²⁴
_TOGETHER = 1024  # blocks with the same candidates
_CODED = Coded()


@dataclass(frozen=True)
class MinimalRandom:
    """A coder of bits, from probabilities of the leaves that `Shared.bernoulli` names; others go as by `Coded`."""

    bits: int = 8
    kl: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 12:
            raise ConfigError(f"mrc: bits must be between 1 and 12, got {self.bits}.")
        if not 0.1 <= self.kl <= 100:
            raise ConfigError(f"mrc: kl must be between 0.1 and 100 bits for each block, got {self.kl}.")

    def encode(self, tree: Mapping[str, Tensor], shared: Shared, sink: Sink) -> None:
        """Write the numbers of the chosen candidates, then the other leaves."""
        chances = {name: leaf for name, leaf in tree.items() if name in shared.bernoulli}
        known = _Prior.of({name: leaf.numel() for name, leaf in chances.items()}, shared)
        if known is not None:
            parts = [check_probabilities(name, leaf).reshape(-1) for name, leaf in chances.items()]
            theta = torch.cat(parts).mul_(float(_ONE)).round_().clamp_(1, _ONE - 1)
            self._write(sink, theta.numpy().astype(np.int64)[known.order], known, shared.key)
        _CODED.encode({name: leaf for name, leaf in tree.items() if name not in chances}, shared, sink)

    def decode(self, source: Source, spec: Spec, shared: Shared) -> Tree:
        """The chosen candidates, then the other leaves."""
        leaves = {name: leaf for name, leaf in spec.items() if name in shared.bernoulli}
        known = _Prior.of({name: leaf.size for name, leaf in leaves.items()}, shared)
        bits = np.zeros(0, np.uint8) if known is None else self._read(source, known, shared.key)
        tree = cut(torch.from_numpy(bits).view(torch.bool), leaves)
        others: dict[str, Leaf] = {name: leaf for name, leaf in spec.items() if name not in leaves}
        return tree | _CODED.decode(source, others, shared)

    def _write(self, sink: Sink, theta: Parts, known: _Prior, key: Key) -> None:
        """The numbers of blocks, context by context, then all indices, of b bits each."""
        chances = key.fold_in("blocks").raw(8 * len(known.sizes)).view("<u8")[: len(known.sizes)] / 2.0**64
        indices = [np.zeros(0, np.int64)]
        for context, part in enumerate(known.slices):
            chosen, prior = theta[part], int(known.prior[context])
            divergence = float(_entropies()[chosen].sum()) - _cross(chosen, prior)
            blocks = math.floor(max(divergence, 0.0) / self.kl + chances[context])
            blocks = min(max(blocks, -(-len(chosen) // _LONGEST)), len(chosen)) if blocks else 0
            sink.write_uint(blocks)
            if blocks:
                indices.append(self._choose(chosen, prior, blocks, context, key))
        flat = np.concatenate(indices)
        planes = (flat[:, None] >> np.arange(self.bits)).astype(np.uint8) & 1
        sink.write(np.packbits(planes.reshape(-1), bitorder="little").tobytes())

    def _choose(self, theta: Parts, prior: int, blocks: int, context: int, key: Key) -> Indices:
        """The number of a candidate for each block, of those that are likely to be a draw from θ."""
        rows = -(-len(theta) // blocks)
        weights: Numbers = np.zeros(rows * blocks, np.float32)
        weights[: len(theta)] = _logits()[theta] - _logits()[prior]
        weights = weights.reshape(rows, blocks)
        found = []
        for part, candidates in self._candidates(rows, blocks, prior, context, key):
            noise = key.fold_in("choice", context, part.start // _TOGETHER).raw(
                2 * (part.stop - part.start) << self.bits
            )
            scores = np.take(_gumbel(), noise.view("<u2")[: part.stop - part.start << self.bits])
            scores = scores.reshape(-1, 1 << self.bits)
            scores += np.ascontiguousarray(weights[:, part].T) @ candidates.astype(np.float32)
            found.append(scores.argmax(axis=1))
        return np.concatenate(found)

    def _read(self, source: Source, known: _Prior, key: Key) -> Bytes:
        blocks = [_read_blocks(source, size) for size in known.sizes.tolist()]
        total = sum(blocks)
        planes = unpack_bits(source.array(-(-total * self.bits // 8)), total * self.bits)
        indices = planes.reshape(total, self.bits).astype(np.int64) @ (1 << np.arange(self.bits))
        ordered, at = np.empty(len(known.order), np.uint8), 0
        for context, (part, number) in enumerate(zip(known.slices, blocks, strict=True)):
            size, prior = part.stop - part.start, int(known.prior[context])
            if not number:  # no index: the only candidate there is
                ordered[part] = _draw(key, context, 0, size, prior)
                continue
            found = np.empty((-(-size // number), number), np.uint8)
            for group, candidates in self._candidates(len(found), number, prior, context, key):
                found[:, group] = np.take(candidates, indices[at + group.start : at + group.stop], axis=1)
            ordered[part], at = found.reshape(-1)[:size], at + number
        bits = np.empty_like(ordered)
        bits[known.order] = ordered
        return bits

    def _candidates(
        self, rows: int, blocks: int, prior: int, context: int, key: Key
    ) -> Iterator[tuple[slice, npt.NDArray[np.bool_]]]:
        """Which blocks of a context share candidates, and these: a row for each bit, a column for each candidate."""
        for group, start in enumerate(range(0, blocks, _TOGETHER)):
            drawn = _draw(key, context, group, rows << self.bits, prior)
            yield slice(start, min(start + _TOGETHER, blocks)), drawn.reshape(rows, -1)


@dataclass(frozen=True)
class _Prior:
    """What both ends expect, as contexts of bits with one probability each."""

    order: Indices
    """The bits' positions, context by context."""
    sizes: Indices
    prior: Indices
    """In 65536ths: the mean of what is expected in a context."""

    @classmethod
    def of(cls, sizes: Mapping[str, int], shared: Shared) -> _Prior | None:
        """That of some leaves, ½ where nothing is expected; None if they have no bits."""
        if not sum(sizes.values()):
            return None
        expected = {name: shared.expected.get(name, torch.full((size,), 0.5)) for name, size in sizes.items()}
        known = Expectation(levels_of(sizes, expected))
        there = known.sizes > 0
        total, sizes_ = known.sums(known.counts * np.arange(len(known.counts)))[there], known.sizes[there]
        return cls(known.order, sizes_, (2 * _ONE * total + (_ONE - 1) * sizes_) // (2 * (_ONE - 1) * sizes_))

    @property
    def slices(self) -> list[slice]:
        """Each context's part of the order."""
        ends = np.cumsum(self.sizes).tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _read_blocks(source: Source, size: int) -> int:
    blocks = source.read_uint(size)
    if blocks and blocks * _LONGEST < size:
        raise PayloadError("count", f"{blocks} blocks for {size} bits, but a block has at most {_LONGEST}")
    return blocks


def _draw(key: Key, context: int, group: int, size: int, prior: int) -> npt.NDArray[np.bool_]:
    """So many bits that are 1 with probability `prior`/65536."""
    words = key.fold_in("candidates", context, group).raw(2 * size).view("<u2")[:size]
    return words < np.uint16(prior)


@lru_cache
def _logits() -> Numbers:
    """Of all probabilities, fixed-point."""
    inside = (round(_FIXED * math.log(part / (_ONE - part))) for part in range(1, _ONE))
    return np.array([0, *inside], np.float32)


@lru_cache
def _gumbel() -> Numbers:
    """Of 65536 equally likely values, fixed-point."""
    return np.array([round(-_FIXED * math.log(-math.log((k + 0.5) / _ONE))) for k in range(_ONE)], np.float32)


@lru_cache
def _entropies() -> npt.NDArray[np.float64]:
    """Σ q log2 q of all probabilities."""
    q = np.arange(_ONE) / _ONE
    q[0] = 0.5
    negative: npt.NDArray[np.float64] = q * np.log2(q) + (1 - q) * np.log2(1 - q)
    return negative


def _cross(theta: Parts, prior: int) -> float:
    """Σ q log2 p."""
    ones, p = int(theta.sum()) / _ONE, prior / _ONE
    return ones * math.log2(p) + (len(theta) - ones) * math.log2(1 - p)
