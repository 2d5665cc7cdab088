"""What a recipe is: a named experiment of a paper, with the paper's figures and ours side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laconic.cluster import Cluster
from laconic.core import ConfigError, Key, did_you_mean

Draw = Callable[[Any], None]
"""Draws on a `matplotlib.figure.Figure`; only called where matplotlib is installed."""


@dataclass(frozen=True)
class Row:
    """One figure: ours beside the paper's, and what it should be.

    Ours is compared with `expected` where it is given (the paper's figure is wrong, or was never printed), else with
    `paper`.

    >>> Row("accuracy", 0.971, paper=0.975, tolerance=0.01).within
    True
    >>> Row("seconds", 3.0).within is None
    True
    """

    label: str
    ours: float
    paper: float | None = None
    expected: float | None = None
    tolerance: float | None = None
    note: str = ""

    @property
    def within(self) -> bool | None:
        """Is ours as near as it should be? None where there is nothing to compare with."""
        target = self.paper if self.expected is None else self.expected
        if target is None or self.tolerance is None:
            return None
        return abs(self.ours - target) <= self.tolerance


@dataclass(frozen=True)
class Outcome:
    """What a recipe found: rows, the numbers behind the figure (plain values), and who draws the figure."""

    rows: tuple[Row, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    draw: Draw | None = None
    seconds: float | None = None
    """What the runs behind it took, whenever they were made; None where there are none."""


@dataclass(frozen=True)
class Job:
    """How a recipe is to be run: its seed, its scale, a folder for what it wants to keep while it runs.

    `adopt` are folders with runs that may be taken up; without `train` nothing else counts. With a `cluster`, runs are
    spread over it.
    """

    seed: int
    scale: float
    folder: Path
    adopt: tuple[Path, ...] = ()
    train: bool = True
    cluster: Cluster | None = None

    @property
    def key(self) -> Key:
        """The root of the recipe's randomness."""
        return Key.from_seed(self.seed)

    def scaled(self, full: int, *, at_least: int = 1) -> int:
        """A full-scale number of repetitions, rounds or clients, made smaller.

        >>> Job(seed=0, scale=0.1, folder=Path()).scaled(200, at_least=30)
        30
        """
        return max(at_least, math.ceil(full * self.scale - 1e-9))


@dataclass(frozen=True)
class Recipe:
    """A named experiment.

    `settings` are those of the full scale; `scale` is the fraction of the work that is done unless asked otherwise;
    `seconds` is about how long that takes on two cores: measured where it was run here, else reckoned from the
    multiply-adds of its images and the speed of those.
    """

    name: str
    reproduces: str
    run: Callable[[Job], Outcome]
    settings: Mapping[str, Any]
    paper: Mapping[str, float]
    seconds: float
    scale: float = 1.0


def find(recipes: Mapping[str, Recipe], name: str) -> Recipe:
    """The recipe of that name, or `ConfigError`."""
    if name not in recipes:
        raise ConfigError(f"unknown recipe {name!r}; {did_you_mean(name, recipes)}")
    return recipes[name]
