"""Rows, jobs and the lookup of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.core import ConfigError, Key
from laconic.reproduce import Job, Row, find, recipes


@pytest.mark.parametrize(
    ("row", "within"),
    [
        (Row("x", 1.0), None),
        (Row("x", 1.0, paper=1.0), None),
        (Row("x", 1.0, tolerance=0.1), None),
        (Row("x", 1.05, paper=1.0, tolerance=0.1), True),
        (Row("x", 1.15, paper=1.0, tolerance=0.1), False),
        (Row("x", 1.05, paper=9.0, expected=1.0, tolerance=0.1), True),  # what is expected goes before what is printed
        (Row("x", 9.0, paper=9.0, expected=1.0, tolerance=0.1), False),
        (Row("x", 1.0, expected=1.0, tolerance=0.0), True),
        (Row("x", float("nan"), expected=1.0, tolerance=1.0), False),
    ],
)
def test_a_row_is_judged(row: Row, within: bool | None) -> None:
    assert row.within is within


def test_a_job_scales_numbers_down() -> None:
    job = Job(seed=3, scale=0.25, folder=Path())
    assert job.scaled(100) == 25
    assert job.scaled(3) == 1
    assert job.scaled(100, at_least=40) == 40
    assert Job(seed=3, scale=1.0, folder=Path()).scaled(7) == 7
    assert Job(seed=3, scale=0.07, folder=Path()).scaled(100) == 7  # 0.07·100 is 7.000000000000001
    assert job.key == Key.from_seed(3)


def test_names_are_looked_up() -> None:
    assert find(recipes, "lg-theory") is recipes["lg-theory"]
    with pytest.raises(ConfigError, match=r"unknown recipe 'lg-teory'; did you mean 'lg-theory'\?"):
        find(recipes, "lg-teory")
    with pytest.raises(ConfigError, match="unknown recipe 'zzz'; known: codecs, em, fedpm-cifar10"):
        find(recipes, "zzz")


@pytest.mark.parametrize("name", list(recipes))
def test_a_recipe_says_what_it_is(name: str) -> None:
    recipe = recipes[name]
    assert recipe.name == name
    assert recipe.reproduces
    assert recipe.settings
    assert recipe.paper or name in (
        "codecs",
        "two-ways",
        "two-ways-writers",
        "fedpm-mrc",
        "fedpm-reset",
        "lg-vqa",
        "precision",
    ), "only what no paper prints"
    assert recipe.seconds > 0
    assert 0 < recipe.scale <= 1
