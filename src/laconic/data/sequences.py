"""Sequences of unequal lengths as arrays: padded, and with the next token as the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.core import IGNORED, DataError


def padded(sequences: Sequence[Any], *, fill: int = 0, length: int | None = None) -> Tensor:
    """Sequences of whole numbers as the rows of one tensor, filled up at the end; longer ones are cut.

    >>> padded([[1, 2, 3], [4]])
    tensor([[1, 2, 3],
            [4, 0, 0]])
    """
    rows = [_tokens(row) for row in sequences]
    size = length if length is not None else max((len(row) for row in rows), default=0)
    table = torch.full((len(rows), size), fill, dtype=torch.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row[:size]
    return table


def next_tokens(sequences: Sequence[Any], *, length: int = 80) -> tuple[Tensor, Tensor]:
    """Inputs and targets of next-token prediction: pieces of at most `length` tokens.

    A target is the token that follows. The last piece of a sequence is filled up with token 0, whose targets do not
    count.

    >>> x, y = next_tokens([[5, 6, 7, 8]], length=2)
    >>> x.tolist(), y.tolist()
    ([[5, 6], [7, 0]], [[6, 7], [8, -100]])
    """
    if length < 1:
        raise DataError(f"next_tokens: length must be at least 1, got {length}.")
    inputs, targets = [torch.zeros(0, length, dtype=torch.int64)], [torch.zeros(0, length, dtype=torch.int64)]
    for tokens in map(_tokens, sequences):
        short = -(len(tokens) - 1) % length
        if len(tokens) > 1:
            inputs.append(F.pad(tokens[:-1], (0, short)).view(-1, length))
            targets.append(F.pad(tokens[1:], (0, short), value=IGNORED).view(-1, length))
    return torch.cat(inputs), torch.cat(targets)


def _tokens(row: Any) -> Tensor:
    values = row if isinstance(row, Tensor) else torch.from_numpy(np.asarray(row, dtype=np.int64).copy())
    if values.dim() != 1 or values.is_floating_point():
        raise DataError(
            f"a sequence must be a list of whole numbers, got {values.dtype} of shape {tuple(values.shape)}."
        )
    return values.to(torch.int64)
