"""Factorization: a matrix as the product of two thin ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.compose import Read, Write
from laconic.codecs.draws import uniform
from laconic.codecs.stream import Sink, Source, in_range
from laconic.core import Key


@dataclass(frozen=True)
class LowRank:
    """A leaf of n rows and m columns (all axes but the first) as P·Qᵀ with `rank` columns each: PowerSGD's compressor
    (Vogels et al., 2019), one power iteration from a random start::

        P = orthogonalised(M·S)        Q = Mᵀ·P        rank·(n + m) values instead of n·m

    Each column of P and Q explains what the earlier ones left, which is Gram–Schmidt in other words. PowerSGD starts
    from the Q of its last message; here S is drawn from the key, so that nothing needs to be remembered. Leaves that
    would not get shorter, as all with fewer than two axes, are handed on as they are.
    """

    rank: int
    rows: int = 0
    quantizes: ClassVar[bool] = False

    def shaped(self, shape: tuple[int, ...]) -> LowRank | None:
        """The stage for leaves of this shape, if it makes them shorter."""
        rows, columns = math.prod(shape[:1]), math.prod(shape[1:])
        return replace(self, rows=rows) if self.rank * (rows + columns) < rows * columns else None

    def encode(self, values: Tensor, key: Key, sink: Sink, rest: Write) -> None:
        """P column by column, then Q."""
        # Double precision in numpy's own order of summation: what is rounded in the end does not depend on threads.
        left = values.view(self.rows, -1).numpy().astype(np.float64)
        p, q = (np.zeros((self.rank, side), np.float32) for side in left.shape)
        for i, start in enumerate(uniform(key, q.size).view(q.shape).numpy() - 0.5):
            column = np.einsum("nm,m->n", left, start)
            norm = in_range(math.sqrt(np.einsum("n,n->", column, column)))
            p[i] = column / (norm or 1.0)
            q[i] = np.einsum("nm,n->m", left, p[i])
            left -= np.multiply.outer(p[i], q[i])
        for factor in (p, q):
            rest(torch.from_numpy(factor).view(-1))

    def decode(self, source: Source, size: int, key: Key, rest: Read) -> Tensor:
        """P·Qᵀ, one column after the other in single precision: the same sums on every machine."""
        columns = size // self.rows
        p, q = (rest(self.rank * side).view(self.rank, side) for side in (self.rows, columns))
        product = torch.zeros(self.rows, columns)
        for i in range(self.rank):
            product += torch.outer(p[i], q[i])
        return product.view(-1)
