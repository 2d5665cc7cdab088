from __future__ import annotations

import inspect
from typing import Any

import pytest

from laconic.core import ConfigError, resolved_settings
from laconic.methods.catalogue import methods


@pytest.mark.parametrize("name", list(methods))
def test_every_method_needs_nothing_but_its_name(name: str) -> None:
    made = methods.build(name, {})
    assert made.name == name
    assert made == methods[name]()
    settings = resolved_settings(methods[name], {})
    assert methods.build(name, _without_none(settings)) == made


@pytest.mark.parametrize("name", list(methods))
def test_every_method_takes_the_settings_of_a_solver(name: str) -> None:
    made: Any = methods.build(name, {"lr": 0.5, "local_epochs": 3, "batch_size": 7, "lr_decay": 0.9})
    solver = made.solver
    assert (solver.lr, solver.local_epochs, solver.batch_size, solver.lr_decay) == (0.5, 3, 7, 0.9)
    with pytest.raises(ConfigError, match=rf"^\[method\] {name}: unknown key 'lrr'; did you mean 'lr'\?$"):
        methods.build(name, {"lrr": 0.5})


@pytest.mark.parametrize("name", list(methods))
def test_every_method_says_what_it_is_in_a_line(name: str) -> None:
    first = (inspect.getdoc(methods[name]) or "").split("\n")[0]
    assert first.endswith((".", "…"))
    assert 20 < len(first) < 120
    parameters = inspect.signature(methods[name]).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("fedprox", {"mu": "0.1"}, "[method] fedprox: mu: should be a valid number, got '0.1'."),
        ("fedprox", {"precision": 1.0}, "[method] fedprox: unknown key 'precision'; "),
        ("fedavg", {"weighting": "size"}, "[method] fedavg: weighting: should be 'uniform' or 'examples', got 'size'."),
        ("fedavg", {"server": {"name": "adam"}}, "[method] fedavg: unknown key 'server'; "),
        ("fedopt", {"server": "adam"}, "[method] fedopt: server: "),
        ("fedopt", {"server": {"name": "sgd", "momentum": 0.9}}, "[method] fedopt: server: unknown key 'momentum'; "),
        (
            "fedmedian",
            {"server": {"nam": "sgd"}},
            "[method] fedmedian: server: unknown key 'nam'; did you mean 'name'?",
        ),
        ("fedensemble", {"members": 2.5}, "[method] fedensemble: members: should be a valid integer, got"),
        ("fedensemble", {"members": 0}, "members must lie between 1 and 255, got 0."),
        (
            "fedensemble",
            {"start_from": "x"},
            "[method] fedensemble: start_from: should be 'random' or 'best', got 'x'.",
        ),
    ],
)
def test_refusals(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        methods.build(name, settings)
    assert str(caught.value).startswith(said)


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    """As TOML keeps them."""
    return {key: value for key, value in settings.items() if value is not None}
