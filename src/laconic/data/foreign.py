"""Partitioners of `flwr_datasets`, used as they are.

A partitioner is handed a table with the columns `row`, `label` and, where the data has them, `coarse_label` and
`group`; so `partition_by` must be one of these. It divides the training rows. The test rows are then divided among
its clients as the training rows are: by group where every group has one client, else class by class.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from laconic.core import DataError, Key
from laconic.data.assignment import Assignment, Examples, IntArray, Ragged, deal, proportional


class ColumnTable:
    """The part of a `datasets.Dataset` that partitioners use, over plain arrays.

    It stands in where that library is not installed. The partitioners of `flwr_datasets` bring the library along
    and insist on it; those of a user's own may not.

    >>> table = ColumnTable({"row": np.arange(4), "label": np.array([1, 0, 1, 0])})
    >>> table.select([2, 0])["row"]
    [2, 0]
    """

    def __init__(self, columns: dict[str, IntArray]) -> None:
        self._columns = columns

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self._columns.values())))

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, item: str | int | slice) -> Any:
        if isinstance(item, str):
            return self._columns[item].tolist()
        return {name: column[item].tolist() for name, column in self._columns.items()}

    def select(self, indices: Sequence[int]) -> ColumnTable:
        """Some rows, in the given order."""
        rows = np.asarray(list(indices), dtype=np.int64)
        return ColumnTable({name: column[rows] for name, column in self._columns.items()})

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> ColumnTable:
        """One of `num_shards` parts of nearly equal size."""
        rows = np.arange(self.num_rows)
        parts = np.array_split(rows, num_shards) if contiguous else [rows[i::num_shards] for i in range(index + 1)]
        return self.select(parts[index].tolist())


def is_foreign_partitioner(partition: object) -> bool:
    """Whether this is a partitioner of `flwr_datasets` (or behaves like one)."""
    return callable(getattr(partition, "load_partition", None))


def load_foreign(partitioner: Any, examples: Examples, clients: int | None, key: Key) -> Assignment:
    """Let a `flwr_datasets` partitioner divide the examples."""
    name = type(partitioner).__name__
    columns: dict[str, IntArray] = {
        "row": np.arange(examples.num_train, dtype=np.int64),
        "label": examples.train_labels,
    }
    if examples.coarse is not None:
        columns["coarse_label"] = examples.coarse[examples.train_labels]
    if examples.groups is not None:
        columns["group"] = examples.groups[: examples.num_train]
    try:
        partitioner.dataset = _table(columns)
        count = int(partitioner.num_partitions)
        lists = [np.asarray(list(partitioner.load_partition(i)["row"]), dtype=np.int64) for i in range(count)]
    except Exception as error:
        raise DataError(
            f"partitioner {name} could not divide the columns {', '.join(columns)}: "
            f"{type(error).__name__}: {error}; a partitioner serves one federation, so make a new one for each."
        ) from error
    if clients is not None and clients != count:
        raise DataError(f"partitioner {name} makes {count} clients, but clients is {clients}; set clients = {count}.")
    train = Ragged.from_lists(lists)
    held = np.bincount(train.flat, minlength=examples.num_train)
    if held.max(initial=0) > 1:
        raise DataError(f"partitioner {name} gave example {int(held.argmax())} to more than one client.")
    test = _like(train, examples, key.fold_in("foreign").numpy())
    return Assignment(train, test, examples.num_train - len(train.flat))


def _table(columns: dict[str, IntArray]) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        return ColumnTable(columns)
    return datasets.Dataset.from_dict({name: column.tolist() for name, column in columns.items()})


def _like(train: Ragged, examples: Examples, rng: np.random.Generator) -> Ragged:
    """Test rows for every client, of the groups or classes that it trains on and in like shares."""
    by_group = _by_group(train, examples)
    if by_group is not None:
        return by_group
    labels = examples.labels if examples.classes else np.zeros(len(examples.labels), dtype=np.int64)
    classes = max(examples.classes, 1)
    counts = np.bincount(train.owner * classes + labels[train.flat], minlength=len(train) * classes)
    shares = counts.reshape(len(train), classes).astype(np.int64)
    test_labels = labels[examples.num_train :]
    stock = np.bincount(test_labels, minlength=classes).astype(np.int64)
    return deal(proportional(shares, stock), test_labels, rng, start=examples.num_train)


def _by_group(train: Ragged, examples: Examples) -> Ragged | None:
    if examples.groups is None:
        return None
    _, numbers = np.unique(examples.groups, return_inverse=True)
    holder = np.full(int(numbers.max()) + 1, -1, dtype=np.int64)
    holder[numbers[train.flat]] = train.owner
    if not np.array_equal(holder[numbers[train.flat]], train.owner):
        return None  # some group is divided among several clients
    return Ragged.from_owner(holder[numbers[examples.num_train :]], len(train), start=examples.num_train)
