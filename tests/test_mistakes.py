"""Plausible mistakes in Python get one sentence that says what, where, what was got and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from torch import nn

import laconic as lc

X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
Y = np.arange(60) % 3


def fit(**given: Any) -> object:
    """A run that would work."""
    usual: dict[str, Any] = {"data": arrays(), "model": lambda: nn.Linear(4, 3), "rounds": 1, "cohort": 2, "workers": 0}
    return lc.fit(**{**usual, **given})


def arrays(y: Any = Y, **given: Any) -> lc.Federation:
    """Its data."""
    return lc.Federation.from_arrays((X, y), **{"clients": 4, **given})


def per_example(output: Any, target: Any) -> Any:
    return F.cross_entropy(output, target, reduction="none")


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "data as a tuple": (
        lambda: fit(data=(X, Y)),
        r"data must be a Federation, got a tuple; make one with .*from_arrays",
    ),
    "a method not called": (lambda: fit(method=lc.fedavg), r"got a function \(fedavg\); call it: fedavg\(\)"),
    "a loss per example": (lambda: fit(loss=per_example), r"one number, the mean over a batch, got shape \(3,\)"),
    "a class as the loss": (lambda: fit(loss=nn.CrossEntropyLoss), r"got a type \(CrossEntropyLoss\); make one"),
    "a name as the loss": (lambda: fit(loss="mse"), r"loss must be a function of outputs and targets, got a str"),
    "metrics in a list": (lambda: fit(metrics=[lc.accuracy]), r"metrics must be a mapping .*, got a list; write"),
    "a seed that is a text": (lambda: fit(seed="a"), r"fit: seed: should be a valid integer, got 'a'"),
    "labels as floats": (lambda: fit(data=arrays(Y.astype(float))), r"y holds floats, .* y\.astype\(int\)"),
    "floats and cross-entropy": (
        lambda: fit(data=arrays(Y.astype(float)), loss=F.cross_entropy),
        r"wants whole numbers as targets.* y\.astype\(int\)",
    ),
    "too few outputs": (
        lambda: fit(model=lambda: nn.Linear(4, 2)),
        r"gives 2 outputs, but arrays has 3 classes, 0 to 2",
    ),
    "a number as a codec": (lambda: fit(up=2), r'a codec is a text such as "eden:bits=1" or a Codec, got an int'),
    "a text for a number": (lambda: lc.fedprox(mu="a"), r"fedprox: mu: should be a valid number, got 'a'"),
    "a table as a solver": (lambda: lc.fedavg(solver={"lr": 0.1}), r"solver: give a Solver, or its fields directly"),
    "clients as a text": (lambda: arrays(clients="4"), r"clients must be a whole number, got '4'"),
    "clients as a mapping": (lambda: lc.Federation.from_clients({"a": (X, Y)}), r"list\(clients\.values\(\)\)"),  # type: ignore[arg-type]
    "x without y": (lambda: lc.Federation.from_clients([X, X]), r"client 0 must be a pair \(x, y\), got ndarray"),  # type: ignore[list-item]
    "a class as an evaluation": (lambda: fit(evaluations=[lc.Global]), r"Global is a class; make one: Global\(\)"),
    "a function as an observer": (lambda: fit(observer=print), r"observer must have started, advanced and finished"),
    "a number as a folder": (lambda: fit(out=3), r"out must be a folder, got an int"),
    "a misspelt scheme": (lambda: fit(init="glorott"), r"did you mean the scheme 'glorot'\?"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str) -> None:
    make, says = MISTAKES[mistake]
    with pytest.raises(lc.UserError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)
