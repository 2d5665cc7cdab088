"""Tables: pandas data frames, Hugging Face datasets, CSV and parquet. Columns become numbers, rows become examples.

A column of numbers is scaled to mean 0 and standard deviation 1 over the training rows of all clients, which a
simulation can do; a column of texts, of booleans or of pandas' categories becomes a column per value (one-hot). What is
missing in a column of numbers is its mean; a missing text is a value of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laconic.core import DataError, Key, did_you_mean
from laconic.data.federation import Federation
from laconic.data.holdout import hold_out
from laconic.data.partition import PartitionSpec

Columns = Mapping[str, NDArray[Any]]
_MOST_VALUES = 1000  # of a column that becomes a column for each


def from_table(
    table: Any,
    *,
    label: str,
    client: str | None = None,
    features: Sequence[str] | None = None,
    categories: Sequence[str] = (),
    test: Any = None,
    clients: int | None = None,
    partition: PartitionSpec | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str = "table",
) -> Federation:
    """A federation from a table: a data frame, a Hugging Face dataset, or a mapping of column names to columns.

    `label` is what is to be predicted: texts, booleans and whole numbers are classes, floats make it regression.
    `client` is the column that says whose a row is: every value is a client. Without it, `partition` divides the rows
    among `clients`. All other columns are inputs, unless `features` names them; `categories` are columns of whole
    numbers that stand for kinds. `test` is a table of the same columns; without one, `test_fraction` is held out.

    >>> rows = {"age": [31, 40, 22, 58] * 5, "sex": list("fmmf") * 5, "ward": list("ab") * 10, "ill": [0, 1] * 10}
    >>> from_table(rows, label="ill", client="ward")
    Federation(table: 2 clients, 16 training and 4 test examples, 2 classes, shape (2,))
    """
    columns = _columns(table, name)
    for column in (label, *([client] if client else []), *(features or ()), *categories):
        if column not in columns:
            raise DataError(f"{name} has no column {column!r}; {did_you_mean(column, list(columns))}")
    used = list(features) if features is not None else [c for c in columns if c not in (label, client)]
    if not used:
        raise DataError(f"{name} has no columns left to learn from, besides {label!r}.")
    rows = len(columns[label])
    if test is not None:
        tests = _columns(test, f"{name}, test")
        missing = [column for column in (label, *used, *([client] if client else [])) if column not in tests]
        if missing:
            raise DataError(f"{name}: test has no column {missing[0]!r}.")
        columns = {column: np.concatenate([columns[column], tests[column]]) for column in (*used, label, *_one(client))}
        train, held = np.arange(rows), np.arange(rows, len(columns[label]))
    else:
        owner = None if client is None else np.unique(columns[client].astype(str), return_inverse=True)[1]
        strata = owner if owner is not None else _strata(columns[label])
        key = Key.from_seed(seed).fold_in("common_test")
        train, held = hold_out(strata.astype(np.int64), fraction=test_fraction, key=key, every=owner is not None)
    x = np.concatenate([_encoded(columns[c], train, c, c in categories, name) for c in used], axis=1)
    y, classes = _targets(columns[label], label, name)
    groups = None if client is None else columns[client].astype(str)
    return Federation.from_arrays(
        (x[train], y[train]),
        (x[held], y[held]),
        clients=clients,
        partition=partition if partition is not None else "iid" if client is None else "groups",
        groups=None if groups is None else groups[train],
        test_groups=None if groups is None else groups[held],
        classes=classes,
        seed=seed,
        name=name,
    )


def from_dataset(
    dataset: Any,
    *,
    clients: int | None = None,
    partition: PartitionSpec = "iid",
    test: Any = None,
    seed: int = 0,
    name: str = "dataset",
) -> Federation:
    """A federation from a torch `Dataset` of pairs (input, target), every one of which is read once.

    >>> import torch
    >>> pairs = torch.utils.data.TensorDataset(torch.zeros(10, 4), torch.arange(10) % 2)
    >>> from_dataset(pairs, clients=2)
    Federation(dataset: 2 clients, 8 training and 2 test examples, 2 classes, shape (4,))
    """
    return Federation.from_arrays(
        _pairs(dataset, name),
        None if test is None else _pairs(test, f"{name}, test"),
        clients=clients,
        partition=partition,
        seed=seed,
        name=name,
    )


def tabular(
    *,
    path: str,
    label: str,
    client: str | None = None,
    features: tuple[str, ...] | None = None,
    categories: tuple[str, ...] = (),
    test: str | None = None,
    clients: int | None = None,
    partition: PartitionSpec | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Federation:
    """A CSV or parquet file with a row per example: numbers are scaled, texts become a column per value.

    `client` is the column whose values are the clients.
    """
    return from_table(
        read_table(path),
        label=label,
        client=client,
        features=features,
        categories=categories,
        test=None if test is None else read_table(test),
        clients=clients,
        partition=partition,
        test_fraction=test_fraction,
        seed=seed,
        name=Path(path).stem,
    )


def read_table(path: str | Path) -> Columns:
    """The columns of a CSV or parquet file."""
    file = Path(path).expanduser()
    kind = file.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise DataError(f"{file}: a table is a .csv or a .parquet file.")
    try:
        module = importlib.import_module("pyarrow.csv" if kind == ".csv" else "pyarrow.parquet")
    except ImportError:
        raise DataError(f'{file}: reading it needs pyarrow; run: pip install "laconic[data]"') from None
    try:
        return _columns((module.read_csv if kind == ".csv" else module.read_table)(str(file)), str(file))
    except DataError:
        raise
    except Exception as error:  # the library has errors of many kinds
        raise DataError(f"{file} cannot be read ({' '.join(str(error).split())}).") from None


def _columns(table: Any, where: str) -> Columns:
    """A table of any kind as its columns."""
    if callable(getattr(table, "with_format", None)):  # a Hugging Face dataset: columns by name as arrow has them
        table = table.with_format("arrow")[:]
    if hasattr(table, "column_names") and hasattr(table, "column"):
        named = {str(name): table.column(name).to_pandas().to_numpy() for name in table.column_names}
    elif isinstance(table, Mapping) or hasattr(table, "columns"):
        named = {
            str(name): np.asarray(table[name]) for name in (table if isinstance(table, Mapping) else table.columns)
        }
    else:
        raise DataError(
            f"{where} must be a data frame, a Hugging Face dataset or a mapping of columns, got {type(table).__name__}."
        )
    if not named or len({len(column) for column in named.values()}) > 1 or not len(next(iter(named.values()))):
        raise DataError(f"{where} has no rows, or columns of different lengths.")
    flat = [column for column, values in named.items() if values.ndim != 1]
    if flat:
        raise DataError(f"{where}: the column {flat[0]!r} holds arrays; use Federation.from_arrays for such data.")
    return named


def _is_number(column: NDArray[Any]) -> bool:
    return column.dtype.kind in "iuf"


def _texts(column: NDArray[Any]) -> NDArray[np.str_]:
    return np.array(["" if value is None or value != value else str(value) for value in column])


def _encoded(column: NDArray[Any], train: NDArray[np.int64], name: str, kinds: bool, where: str) -> NDArray[np.float32]:
    """A column as inputs: scaled, or a column per value that the training rows have."""
    if _is_number(column) and not kinds:
        values = column.astype(np.float64)
        known = values[train][np.isfinite(values[train])]
        if not len(known):
            raise DataError(f"{where}: the column {name!r} holds no number; leave it out of features.")
        spread = float(known.std()) or 1.0
        filled = np.where(np.isfinite(values), values, known.mean())
        return np.asarray((filled - known.mean()) / spread, dtype=np.float32)[:, None]
    texts = _texts(column)
    found = np.unique(texts[train])
    if len(found) > _MOST_VALUES:
        raise DataError(
            f"{where}: the column {name!r} has {len(found)} different values, too many for a column each; leave it out "
            "of features."
        )
    if len(found) == 2:
        found = found[1:]  # one column tells them apart
    return np.asarray(texts[:, None] == found[None, :], dtype=np.float32)


def _targets(column: NDArray[Any], label: str, where: str) -> tuple[NDArray[Any], int | None]:
    if column.dtype.kind == "f":
        if not np.isfinite(column).all():
            raise DataError(f"{where}: the label {label!r} is missing in row {int((~np.isfinite(column)).argmax())}.")
        return column, None
    if _is_number(column) and column.min() >= 0:
        return column.astype(np.int64), None
    texts = _texts(column)
    if (texts == "").any():
        raise DataError(f"{where}: the label {label!r} is missing in row {int((texts == '').argmax())}.")
    found, numbers = np.unique(texts, return_inverse=True)
    return numbers.astype(np.int64), len(found)


def _strata(column: NDArray[Any]) -> NDArray[np.int64]:
    if column.dtype.kind == "f":
        return np.zeros(len(column), dtype=np.int64)
    return np.unique(_texts(column), return_inverse=True)[1].astype(np.int64)


def _one(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)


def _pairs(dataset: Any, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"{where} must have a length and items, got {type(dataset).__name__}.")
    inputs, targets = [], []
    for place in range(len(dataset)):
        item = dataset[place]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{where}: item {place} must be a pair (input, target), got {type(item).__name__}.")
        inputs.append(np.asarray(item[0]))
        targets.append(np.asarray(item[1]))
    if not inputs:
        raise DataError(f"{where} is empty.")
    try:
        return np.stack(inputs), np.stack(targets)
    except ValueError:
        raise DataError(f"{where}: its inputs, or its targets, have different shapes.") from None
