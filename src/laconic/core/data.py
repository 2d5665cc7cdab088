"""What a method sees of a client's data: two parts, one to train on and one of its own to test on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def channels_last(images: Tensor) -> Tensor:
    """The same images with a pixel's channels side by side in memory, which convolutions on a CPU are quicker with.

    >>> channels_last(torch.zeros(5, 1, 4, 4)).stride(), channels_last(torch.zeros(5, 3, 4, 4)).stride()
    ((16, 1, 4, 1), (48, 1, 12, 3))
    """
    if images.shape[1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    # With one channel both orders are the same bytes, and torch goes by the strides.
    _, _, height, width = images.shape
    return images.contiguous().as_strided(images.shape, (height * width, 1, width, 1))


@dataclass(frozen=True)
class Part:
    """Some examples of a dataset: `index` into tensors that all clients share.

    `protected` are attributes of every row that must not be predictable from what is learnt (sex, say), where the
    data has them. Nothing is copied until a batch is taken, so that a hundred thousand clients cost their indices only.

    >>> part = Part(torch.arange(10.0), torch.arange(10), torch.tensor([7, 3]))
    >>> len(part), part.tensors()[0]
    (2, tensor([7., 3.]))
    """

    x: Tensor
    y: Tensor
    index: Tensor
    protected: Tensor | None = None

    @classmethod
    def whole(cls, x: Tensor, y: Tensor) -> Part:
        """All examples of a pair of tensors."""
        return cls(x, y, torch.arange(len(x)))

    def __len__(self) -> int:
        return len(self.index)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the part, in order."""
        return self.take(self.index)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some rows of the tensors, images in the order in memory that the tensors have."""
        x = self.x[rows]
        return (channels_last(x) if x.ndim == 4 and self.x.stride(1) == 1 else x), self.y[rows]

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Mini-batches of `size` (the last may be smaller), in the given order of positions."""
        for rows in self.rows(size, order):
            yield self.take(rows)

    def rows(self, size: int, order: Tensor | None = None) -> Iterator[Tensor]:
        """The row numbers of the mini-batches."""
        yield from torch.split(self.index if order is None else self.index[order], size)


@dataclass(frozen=True)
class ClientData:
    """One client's examples."""

    train: Part
    test: Part


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows about a client when a round begins."""

    id: int
    round: int
    examples: int
