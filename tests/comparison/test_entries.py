from __future__ import annotations

from pathlib import Path

import pytest

from laconic.comparison import read_entries
from laconic.core import ConfigError


def test_methods_under_the_conditions_of_a_file(work: Path) -> None:
    names, tables = zip(*read_entries(["fedprox:mu=0.1,lr=0.05", "fedavg"], base=Path("small.toml")), strict=True)
    assert names == ("fedprox:mu=0.1,lr=0.05", "fedavg")
    assert [table["method"] for table in tables] == [{"name": "fedprox", "mu": 0.1, "lr": 0.05}, {"name": "fedavg"}]
    assert all(table["run"]["rounds"] == 4 and table["data"]["clients"] == 6 for table in tables)


def test_codecs_and_lists() -> None:
    ((_, table),) = read_entries(["lg_fedavg:private=['a.*', 'b'],mu=0.1@topk:fraction=0.1 | eden:bits=2"])
    assert table["method"] == {"name": "lg_fedavg", "private": ["a.*", "b"], "mu": 0.1}
    assert table["link"] == {"up": "topk:fraction=0.1 | eden:bits=2"}


def test_overrides_hold_for_all_and_change_no_file(work: Path) -> None:
    entries = read_entries(
        ["fedavg", "small.toml"], base=Path("small.toml"), overrides=["method.lr=0.5", "run.rounds=9"]
    )
    assert [table["method"]["lr"] for _, table in entries] == [0.5, 0.5]
    assert [table["run"]["rounds"] for _, table in entries] == [9, 9]
    assert "lr" not in read_entries(["small.toml"])[0][1]["method"]


def test_nothing_is_evaluated_that_a_file_does_not_say(work: Path) -> None:
    assert "evaluations" not in read_entries(["small.toml"])[0][1]["run"]
    ((_, table),) = read_entries(["small.toml"], overrides=['run.evaluations=["ensemble"]'])
    assert table["run"]["evaluations"] == ["ensemble"]


@pytest.mark.parametrize("word", ["fedavg:lr", "fedavg:=3", "fedavg:lr="])
def test_settings_that_are_none(word: str) -> None:
    with pytest.raises(ConfigError, match="settings are written key=value"):
        read_entries([word])
