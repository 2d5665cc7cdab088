"""UCI Adult: does a person earn more than 50,000 dollars? With race and sex as protected attributes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.core import DataError, Key
from laconic.data.federation import Federation, pooled
from laconic.data.holdout import check_limit, hold_out
from laconic.data.partition import PartitionSpec
from laconic.data.tables import Place

_NUMBERS = {"age": 0, "education-num": 4, "capital-gain": 10, "capital-loss": 11, "hours-per-week": 12}
_NAMES = {
    "workclass": 1,
    "education": 3,
    "marital-status": 5,
    "occupation": 6,
    "relationship": 7,
    "native-country": 13,
}
_RACE, _SEX, _INCOME, _COLUMNS = 8, 9, 14, 15


def adult(
    *,
    clients: int = 10,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    rows: int | None = None,
    test: Literal["half", "official"] = "half",
) -> Federation:
    """UCI Adult as in the fairness experiments of Liang et al. (2020): 93 features, 2 classes.

    People of race White or Black only. The weight `fnlwgt`, race and sex are no features; names are one-hot
    without their first level ("?" is a level), and all is standardised by the training half. `protected` holds
    (race is White, sex is Male) of every row.

    `test="half"` splits `adult.data` into equal halves by class, the same for every seed; `"official"` trains on
    `adult.data` and tests on `adult.test`. `rows` takes that many people before the split: 30,000 with
    `partition="sorted_shards"` and 10 clients gives the published 100 shards of 150. `limit` takes the first
    training examples after it.

    The files `adult.data` and `adult.test` are looked for in `$LACONIC_DATA/adult`.
    """
    check_limit(limit, "adult")
    if rows is not None and rows < 2:
        raise DataError(f"adult: rows must be at least 2, got {rows}.")
    place = Place("adult", ("adult",))
    folder = place.folder()
    if folder is None:
        raise DataError(f"adult: {place.expected()}; put adult.data and adult.test of UCI Adult there.")
    people = _read(folder / "adult.data")
    # Levels come from all people, so that there are 93 features however few rows are taken.
    levels = {name: sorted({person[column] for person in people})[1:] for name, column in _NAMES.items()}
    people = people[:rows]
    if test == "official":
        held = _read(folder / "adult.test")
        train_rows, test_rows = np.arange(len(people)), np.arange(len(people), len(people) + len(held))
        people = people + held
    elif test == "half":
        train_rows, test_rows = hold_out(_income(people), fraction=0.5, key=Key.from_seed(0).fold_in("adult"))
    else:
        raise DataError(f"adult: test must be 'half' or 'official', got {test!r}.")
    train_rows = train_rows[:limit]
    features = _features(people, levels)
    mean, std = features[train_rows].mean(axis=0), features[train_rows].std(axis=0)
    features = (features - mean) / np.where(std > 0, std, 1.0)
    protected = np.array([[p[_RACE] == "White", p[_SEX] == "Male"] for p in people], dtype=np.float32)
    order = np.concatenate([train_rows, test_rows])
    return pooled(
        "adult",
        torch.from_numpy(features[order].astype(np.float32)),
        torch.from_numpy(_income(people)[order]),
        num_train=len(train_rows),
        clients=clients,
        partition=partition,
        seed=seed,
        classes=2,
        protected=torch.from_numpy(protected[order]),
    )


def _read(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file)]
    except OSError as error:
        raise DataError(f"adult: {path} cannot be read ({error.strerror}).") from None
    people = []
    for number, line in enumerate(lines, 1):
        if not line or line[0].startswith("|") or line == [""]:
            continue
        if len(line) != _COLUMNS or line[_INCOME].rstrip(".") not in ("<=50K", ">50K"):
            raise DataError(f"adult: line {number} of {path} is no record of {_COLUMNS} columns; is it UCI Adult?")
        if line[_RACE] in ("White", "Black"):
            people.append(line)
    if not people:
        raise DataError(f"adult: {path} holds no records.")
    return people


def _income(people: list[list[str]]) -> NDArray[np.int64]:
    return np.array([person[_INCOME].startswith(">") for person in people], dtype=np.int64)


def _features(people: list[list[str]], levels: dict[str, list[str]]) -> NDArray[np.float64]:
    try:
        numbers = np.array([[float(person[c]) for c in _NUMBERS.values()] for person in people])
    except ValueError as error:
        raise DataError(f"adult: a numeric column holds text ({error}).") from None
    blocks = [numbers]
    for name, column in _NAMES.items():
        values = np.array([person[column] for person in people])
        blocks.append((values[:, None] == np.array(levels[name])[None, :]).astype(np.float64))
    return np.concatenate(blocks, axis=1)
