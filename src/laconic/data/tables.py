"""Datasets in the hub's layout: `<split>-*.parquet` in a folder, or the same columns from the hub itself.

`LACONIC_DATA` names the folder of folders. A dataset that is not found there is asked of the hub by the `datasets`
library, where that is installed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laconic.core import DataError
from laconic.data.cache import file_key, load_cached, save_cached
from laconic.data.images import decode


@dataclass(frozen=True)
class Place:
    """Where a dataset is to be found: folders to try, in order, then the hub."""

    name: str
    folders: tuple[str, ...]
    hub: str | None = None
    config: str | None = None

    def folder(self) -> Path | None:
        """The first of the folders that is there, in `LACONIC_DATA` or by its absolute path."""
        root = os.environ.get("LACONIC_DATA")
        for folder in map(Path, self.folders):
            path = Path(root) / folder if root else folder  # an absolute folder stays as it is
            if (root or folder.is_absolute()) and path.is_dir():
                return path
        return None

    def expected(self) -> str:
        """What is missing, in words."""
        root = os.environ.get("LACONIC_DATA")
        if root is None:
            return f"LACONIC_DATA is not set (it should name a folder that holds {self.folders[0]}/)"
        return f"there is no folder {Path(root) / self.folders[0]} (LACONIC_DATA is {root})"


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a dataset: the pixels, or a table of numbers, and the other columns that were asked for."""

    inputs: NDArray[Any]
    columns: dict[str, NDArray[Any]]


def has_split(place: Place, split: str) -> bool:
    """Whether a split is there."""
    folder = place.folder()
    if folder is not None:
        return bool(_files(folder, split))
    datasets = _hub_library(place)
    try:
        return split in datasets.get_dataset_split_names(place.hub, place.config)
    except Exception as error:
        raise _unreachable(place, error) from error


def read_split(
    place: Place,
    split: str,
    *,
    image: str,
    columns: Sequence[str],
    channels: int | None = None,
    size: int | None = None,
    limit: int | None = None,
) -> Split:
    """The first `limit` rows of a split, decoded."""
    where = f"{place.name}, split {split!r}"
    folder = place.folder()
    pieces: list[tuple[NDArray[Any], dict[str, NDArray[Any]]]] = []
    if folder is not None:
        files = _files(folder, split)
        if not files:
            raise DataError(f"{place.name}: the folder {folder} holds no {split}-*.parquet.")
        for file in files:
            rows = None if limit is None else limit - sum(len(inputs) for inputs, _ in pieces)
            if rows is None or rows > 0:
                pieces.append(_read_file(file, image, columns, channels, size, rows, where))
    else:
        pieces.append(_read_hub(place, split, image, columns, channels, size, limit, where))
    try:
        inputs = np.concatenate([inputs for inputs, _ in pieces]) if len(pieces) > 1 else pieces[0][0]
    except ValueError:
        raise DataError(f"{where}: its files hold images of different sizes; set size to make them alike.") from None
    return Split(inputs, {name: np.concatenate([piece[name] for _, piece in pieces]) for name in columns})


def _files(folder: Path, split: str) -> list[Path]:
    for place in (folder, folder / "data"):
        files = sorted(place.glob(f"{split}-*.parquet")) or sorted(place.glob(f"{split}.parquet"))
        if files:
            return files
    return []


def _read_file(
    path: Path,
    image: str,
    columns: Sequence[str],
    channels: int | None,
    size: int | None,
    limit: int | None,
    where: str,
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    parquet = _need("pyarrow.parquet", where)
    arrow = _need("pyarrow", where)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in (image, *columns) if name not in names]
            if missing:
                raise DataError(f"{where}: {path} has no column {missing[0]!r}; it has {', '.join(names)}.")
            total = file.metadata.num_rows
            rows = total if limit is None else min(limit, total)
            key = file_key(path, image, channels, size)
            pixels = load_cached(key, rows=total)
            wanted = [*columns] if pixels is not None else [image, *columns]
            table = _first_rows(file, wanted, rows)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{where}: {path} cannot be read ({error}); is it a complete parquet file?") from None
    others = {name: _plain(table.column(name), name, where) for name in columns}
    if pixels is not None:
        return pixels[:rows], others
    inputs, encoded = _inputs(table.column(image), image, channels, size, where)
    if encoded and rows == total:
        save_cached(key, inputs)
    return inputs, others


def _first_rows(file: Any, columns: list[str], rows: int) -> Any:
    """Some columns of the first rows, reading no more row groups than they need."""
    groups, seen = 0, 0
    while seen < rows:
        seen += file.metadata.row_group(groups).num_rows
        groups += 1
    return file.read_row_groups(list(range(groups)), columns=columns).slice(0, rows)


def _read_hub(
    place: Place,
    split: str,
    image: str,
    columns: Sequence[str],
    channels: int | None,
    size: int | None,
    limit: int | None,
    where: str,
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    datasets = _hub_library(place)
    try:
        data = datasets.load_dataset(place.hub, place.config, split=split)
    except Exception as error:
        raise _unreachable(place, error) from error
    names = list(data.column_names)
    missing = [name for name in (image, *columns) if name not in names]
    if missing:
        raise DataError(f"{where}: {place.hub} has no column {missing[0]!r}; it has {', '.join(names)}.")
    if isinstance(data.features[image], datasets.Image):
        data = data.cast_column(image, datasets.Image(decode=False))
    rows = len(data) if limit is None else min(limit, len(data))
    table = data.select(range(rows)).select_columns([image, *columns]).with_format("arrow")[:]
    inputs, _ = _inputs(table.column(image), image, channels, size, where)
    return inputs, {name: _plain(table.column(name), name, where) for name in columns}


def _inputs(column: Any, name: str, channels: int | None, size: int | None, where: str) -> tuple[NDArray[Any], bool]:
    """Pixels from encoded images, or numbers as they stand; and which of the two it was."""
    types = _need("pyarrow.types", where)
    kind = column.type
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        blobs = _need("pyarrow.compute", where).struct_field(column, "bytes")
        return decode(_values(blobs), channels=channels, size=size, where=where), True
    if types.is_binary(kind) or types.is_large_binary(kind):
        return decode(_values(column), channels=channels, size=size, where=where), True
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        try:
            return np.array(column.to_pylist(), dtype=np.float32), False
        except (ValueError, TypeError):
            raise DataError(f"{where}: the lists of column {name!r} are not numbers of one shape.") from None
    raise DataError(f"{where}: column {name!r} has the type {kind}; it should hold images or lists of numbers.")


def _values(column: Any) -> Iterator[bytes | None]:
    for chunk in column.chunks:
        for value in chunk:
            yield value.as_py()


def _plain(column: Any, name: str, where: str) -> NDArray[Any]:
    if column.null_count:
        raise DataError(f"{where}: column {name!r} has {column.null_count} missing values; remove such rows.")
    values = column.to_numpy()
    return values.astype(str) if values.dtype == object else np.array(values)


def _need(module: str, where: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        library = module.split(".")[0]
        raise DataError(f'{where}: reading it needs {library}; run: pip install "laconic[data]"') from None


def _hub_library(place: Place) -> Any:
    if place.hub is None:
        raise DataError(f"{place.name}: {place.expected()}.")
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"{place.name}: {place.expected()}, and loading {place.hub!r} from the hub needs the library "
            'datasets; run: pip install "laconic[data]"'
        ) from None


def _unreachable(place: Place, error: Exception) -> DataError:
    reason = (str(error).splitlines() or [""])[0]
    return DataError(
        f"{place.name}: {place.expected()}, and {place.hub!r} could not be had from the hub "
        f"({type(error).__name__}: {reason})."
    )
