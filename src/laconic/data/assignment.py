"""Who holds which example: rows of a pool of examples, dealt to clients.

A pool is always ordered the same way: the training rows first, `0 … num_train - 1`, then the rows of the common
test set. An assignment names rows of it, so that a client costs nothing but its row numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laconic.core import DataError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Many lists of row numbers in one array: `flat[offsets[i]:offsets[i + 1]]` is the list of client `i`.

    >>> rows = Ragged.from_lists([[4, 2], [], [7]])
    >>> len(rows), rows[0].tolist(), rows[1].tolist(), rows.sizes.tolist()
    (3, [4, 2], [], [2, 0, 1])
    """

    flat: IntArray
    offsets: IntArray

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int] | IntArray]) -> Ragged:
        """One list per client, as given."""
        arrays = [np.asarray(rows, dtype=np.int64) for rows in lists]
        sizes = np.array([len(rows) for rows in arrays], dtype=np.int64)
        return cls(np.concatenate(arrays) if arrays else np.zeros(0, np.int64), _offsets(sizes))

    @classmethod
    def from_sizes(cls, sizes: IntArray, *, start: int = 0) -> Ragged:
        """Consecutive rows from `start` on, so many for each client."""
        return cls(np.arange(start, start + int(sizes.sum()), dtype=np.int64), _offsets(sizes))

    @classmethod
    def from_owner(cls, owner: IntArray, clients: int, *, start: int = 0) -> Ragged:
        """Row `start + j` goes to client `owner[j]`, or to nobody where that is negative; rows stay in order.

        >>> [rows.tolist() for rows in Ragged.from_owner(np.array([1, 0, -1, 1]), 2)]
        [[1], [0, 3]]
        """
        order = np.argsort(owner, kind="stable")
        kept = order[int((owner < 0).sum()) :]
        return cls(kept.astype(np.int64) + start, _offsets(np.bincount(owner[kept], minlength=clients)))

    @property
    def sizes(self) -> IntArray:
        """Number of rows of each client."""
        return np.diff(self.offsets)

    @property
    def owner(self) -> IntArray:
        """The client of each entry of `flat`."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> IntArray:
        if not 0 <= client < len(self):
            raise IndexError(client)
        return self.flat[self.offsets[client] : self.offsets[client + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[client] for client in range(len(self)))


@dataclass(frozen=True, eq=False)
class Examples:
    """What a partition may look at: the labels of a pool and, where the data has them, groups and coarse labels.

    `classes` is 0 where the targets are not classes. `groups` has a number per row (a writer, say);
    `coarse` has a number per class (CIFAR-100's superclasses).
    """

    labels: IntArray
    num_train: int
    classes: int
    groups: IntArray | None = None
    coarse: IntArray | None = None

    @property
    def num_test(self) -> int:
        """Rows of the common test set."""
        return len(self.labels) - self.num_train

    @property
    def train_labels(self) -> IntArray:
        """Labels of the training rows."""
        return self.labels[: self.num_train]

    @property
    def test_labels(self) -> IntArray:
        """Labels of the common test set."""
        return self.labels[self.num_train :]

    def train_stock(self) -> IntArray:
        """Training examples of each class."""
        return np.bincount(self.train_labels, minlength=self.classes).astype(np.int64)

    def test_stock(self) -> IntArray:
        """Test examples of each class."""
        return np.bincount(self.test_labels, minlength=self.classes).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Each client's training rows and the rows of its own test set.

    `dropped` counts training rows that no client holds. `common` lists the rows of the common test set where it
    is not simply all test rows.
    """

    train: Ragged
    test: Ragged
    dropped: int = 0
    common: IntArray | None = None


def even_sizes(total: int, parts: int) -> IntArray:
    """Sizes as equal as can be; the first few parts have one more.

    >>> even_sizes(11, 3).tolist()
    [4, 4, 3]
    """
    base, extra = divmod(total, parts)
    return np.full(parts, base, dtype=np.int64) + (np.arange(parts) < extra)


def deal(counts: IntArray, labels: IntArray, rng: np.random.Generator, *, start: int = 0) -> Ragged:
    """Hand out examples at random so that client `i` gets `counts[i, c]` of class `c`, none of them twice."""
    owner = np.full(len(labels), -1, dtype=np.int64)
    clients = np.arange(len(counts), dtype=np.int64)
    for label in np.flatnonzero(counts.sum(axis=0)):
        rows = rng.permutation(np.flatnonzero(labels == label))
        holders = np.repeat(clients, counts[:, label])
        if len(holders) > len(rows):
            raise DataError(
                f"class {label} has {len(rows)} examples, but the partition asks for {len(holders)}; "
                "ask for fewer examples or fewer clients."
            )
        owner[rows[: len(holders)]] = holders
    return Ragged.from_owner(owner, len(counts), start=start)


def proportional(counts: IntArray, stock: IntArray) -> IntArray:
    """Counts for another set of examples: each class is divided among the clients as `counts` divides it.

    >>> proportional(np.array([[30, 0], [10, 8]]), np.array([8, 5])).tolist()
    [[6, 0], [2, 5]]
    """
    edges = np.cumsum(counts, axis=0)
    share = edges / np.maximum(edges[-1], 1)
    return np.asarray(np.diff(np.rint(share * stock).astype(np.int64), axis=0, prepend=0))


def _offsets(sizes: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
