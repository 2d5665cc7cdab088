from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from tests.methods.conftest import definition, inside

from laconic.core import ConfigError, Method, resolved_settings
from laconic.methods import Solver
from laconic.methods.catalogue import methods
from laconic.testing import small_task


@pytest.mark.parametrize("name", list(methods))
def test_every_method_needs_nothing_but_its_name(name: str) -> None:
    made = methods.build(name, {})
    assert made.name == name
    assert definition(made) == definition(methods[name]())
    settings = resolved_settings(methods[name], {})
    assert dict(made.settings) == settings
    assert definition(methods.build(name, _without_none(settings))) == definition(made)


@pytest.mark.parametrize("name", list(methods))
def test_settings_are_plain_and_all_of_them(name: str) -> None:
    made = methods[name](lr=0.5, batch_size=7)
    assert json.loads(json.dumps(made.settings)) == made.settings
    assert made.settings.keys() == resolved_settings(methods[name], {}).keys()
    assert (made.settings["lr"], made.settings["batch_size"]) == (0.5, 7)


def solver_of(method: Method) -> Solver:
    """The solver that clients really fit with."""
    within = inside(method.bind(small_task()))
    while hasattr(within, "part"):  # the method that a wrapper's clients train what is shared with
        within = inside(within.part)
    found: Solver = within.solver
    return found


@pytest.mark.parametrize("name", list(methods))
def test_every_method_takes_the_settings_of_a_solver(name: str) -> None:
    given = {"lr": 0.5, "local_epochs": 3, "batch_size": 7, "lr_decay": 0.9}
    made = methods.build(name, given)
    solver = solver_of(made)
    assert (solver.lr, solver.local_epochs, solver.batch_size, solver.lr_decay) == (0.5, 3, 7, 0.9)
    assert given.items() <= made.settings.items()
    assert definition(methods[name](**given)) == definition(made)  # in Python they need no Solver either
    assert definition(methods[name](solver=solver)) == definition(made)
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


def test_a_solver_and_its_fields_are_not_given_together() -> None:
    with pytest.raises(ConfigError, match=r"^fedavg: give solver, or its fields directly, not both\.$"):
        methods["fedavg"](solver=Solver(lr=0.5), lr=0.5)
    with pytest.raises(ConfigError, match=r"^fedavg: unknown key 'lrr'; did you mean 'lr'\?$"):
        methods["fedavg"](lrr=0.5)


@pytest.mark.parametrize("name", list(methods))
def test_a_word_that_is_no_setting_is_refused_in_python_too(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: unknown key 'lrr'; did you mean 'lr'\?$"):
        methods[name](lrr=0.5)
    for word in ("task", "population", "name"):  # what the classes behind some of them have besides
        with pytest.raises(ConfigError, match=rf"^{name}: unknown key '{word}'; "):
            methods[name](**{word: small_task()})


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    """As TOML keeps them."""
    return {key: value for key, value in settings.items() if value is not None}
