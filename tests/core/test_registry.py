from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from laconic.core import ConfigError, Registry, checked_settings, flat, resolved_settings


@flat
@dataclass(frozen=True, kw_only=True)
class Steps:
    lr: float = 0.1
    steps: int | None = None
    kind: Literal["sgd", "adam"] = "sgd"

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"lr must be positive, got {self.lr}.")


@dataclass(frozen=True)
class Server:
    name: str = "adam"
    lr: float = 0.01
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ConfigError(f"server lr must not be negative, got {self.lr}.")


def train(
    given: int,
    *,
    name: str = "x",
    rate: float = 1.5,
    deep: bool = False,
    hidden: tuple[int, ...] = (3, 4),
    server: Server | None = None,
    other: Server = Server("sgd", 1.0),
    solver: Steps = Steps(lr=0.5),
) -> dict[str, Any]:
    """Train something.

    At length.
    """
    return {**locals()}


def needs(*, size: int, colour: str = "red") -> tuple[int, str]:
    """Needs a size."""
    return size, colour


def import_(*, x: int = 0) -> int:
    return x


REGISTRY: Registry[Any] = Registry("thing", [train, needs, import_])


def check(**settings: Any) -> dict[str, Any]:
    return checked_settings(train, settings, where="[thing] train")


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(**settings)
    return str(caught.value)


# --- looking up ------------------------------------------------------------------------------------------------------


def test_a_registry_is_a_mapping() -> None:
    assert list(REGISTRY) == ["train", "needs", "import"]
    assert len(REGISTRY) == 3
    assert REGISTRY["train"] is train
    assert "import" in REGISTRY
    assert "import_" not in REGISTRY


def test_unknown_names_come_with_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        REGISTRY["trian"]
    assert str(caught.value) == "unknown thing 'trian'; did you mean 'train'?"
    with pytest.raises(ConfigError, match=r"unknown thing 'q'; known: import, needs, train\."):
        REGISTRY.build("q", {})


def test_lines_are_for_the_list() -> None:
    assert REGISTRY.lines()[0] == ("train", "Train something.", f"{__name__}:train")
    assert REGISTRY.lines()[2][1] == ""


def test_build_calls_with_checked_settings() -> None:
    made = REGISTRY.build("train", {"rate": 2, "lr": 0.25}, given=(9,))
    assert (made["given"], made["rate"], made["solver"]) == (9, 2.0, Steps(lr=0.25))
    with pytest.raises(ConfigError, match=r"^\[thing\] needs: the key 'size' is required\.$"):
        REGISTRY.build("needs", {"colour": "blue"})


# --- checking --------------------------------------------------------------------------------------------------------


def test_nothing_given_nothing_passed_on() -> None:
    assert check() == {}


def test_plain_values_become_the_parameters_types() -> None:
    settings = check(rate=2, hidden=[5], deep=True, server=None)
    assert settings == {"rate": 2.0, "hidden": (5,), "deep": True, "server": None}
    assert isinstance(settings["rate"], float)


def test_flat_groups_lend_their_fields_and_keep_the_rest_of_the_default() -> None:
    assert check(steps=7) == {"solver": Steps(lr=0.5, steps=7)}
    assert check(kind="adam", lr=1, name="y") == {"solver": Steps(lr=1.0, kind="adam"), "name": "y"}


def test_a_table_makes_a_dataclass() -> None:
    assert check(server={"name": "sgd", "options": {"momentum": 0.9}}) == {
        "server": Server("sgd", 0.01, {"momentum": 0.9})
    }
    assert check(other={"lr": 1}) == {"other": Server("adam", 1.0)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rat": 1}, "[thing] train: unknown key 'rat'; did you mean 'rate'?"),
        ({"stepps": 1}, "[thing] train: unknown key 'stepps'; did you mean 'steps'?"),
        ({"solver": {"lr": 1.0}}, "[thing] train: unknown key 'solver'; did you mean 'server'?"),
        ({"given": 1}, "[thing] train: unknown key 'given'; known: deep, hidden, kind, lr, name, other, "),
        ({"rate": "fast"}, "[thing] train: rate: should be a valid number, got 'fast'."),
        ({"rate": "1.5"}, "[thing] train: rate: should be a valid number, got '1.5'."),
        ({"rate": True}, "[thing] train: rate: should be a valid number, got True."),
        ({"deep": 1}, "[thing] train: deep: should be a valid boolean, got 1."),
        ({"name": 3}, "[thing] train: name: should be a valid string, got 3."),
        ({"hidden": 3}, "[thing] train: hidden: should be a valid array, got 3."),
        ({"hidden": [3, "x"]}, "[thing] train: hidden: should be a valid integer, got 'x'."),
        ({"steps": 1.5}, "[thing] train: steps: should be a valid integer, got"),
        ({"kind": "adm"}, "[thing] train: kind: should be 'sgd' or 'adam', got 'adm'."),
        ({"other": {"nam": "x"}}, "[thing] train: other: unknown key 'nam'; did you mean 'name'?"),
        ({"server": {"momentum": 0.9}}, "[thing] train: server: unknown key 'momentum'; known: lr, name, options."),
        ({"other": {"lr": "x"}}, "[thing] train: other.lr: should be a valid number, got 'x'."),
        ({"other": 3}, "[thing] train: other: "),
        ({"server": {"lr": []}}, "[thing] train: server"),
        ({"lr": -1}, "lr must be positive, got -1.0."),
        ({"other": {"lr": -2}}, "server lr must not be negative, got -2.0."),
        ({"rate": datetime.date(2026, 1, 2)}, "[thing] train: rate: a date is no setting, got 2026-01-02."),
        ({"hidden": [datetime.time(1)]}, "[thing] train: hidden: a list is no setting, got"),
    ],
)
def test_refusals_say_where_what_and_what_was_given(settings: dict[str, Any], said: str) -> None:
    sentence = refusal(**settings)
    assert sentence.startswith(said)
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence


# --- what a run records ----------------------------------------------------------------------------------------------


def test_resolved_settings_are_all_of_them() -> None:
    assert resolved_settings(train, {"lr": 2.0, "rate": 3}) == {
        "name": "x",
        "rate": 3,
        "deep": False,
        "hidden": [3, 4],
        "server": None,
        "other": {"name": "sgd", "lr": 1.0, "options": {}},
        "lr": 2.0,
        "steps": None,
        "kind": "sgd",
    }


def test_a_table_is_recorded_with_the_fields_that_it_leaves_out() -> None:
    resolved = resolved_settings(train, {"server": {"name": "sgd"}, "other": {"lr": 3}})
    assert resolved["server"] == {"name": "sgd", "lr": 0.01, "options": {}}
    assert resolved["other"] == {"name": "adam", "lr": 3.0, "options": {}}


def test_required_settings_are_recorded_when_given() -> None:
    assert resolved_settings(needs, {"size": 3}) == {"size": 3, "colour": "red"}


def test_what_is_resolved_builds_the_same_thing() -> None:
    settings = {"lr": 2.0, "server": {"name": "sgd"}, "hidden": [1]}
    assert REGISTRY.build("train", settings, given=(1,)) == REGISTRY.build(
        "train", resolved_settings(train, settings), given=(1,)
    )
