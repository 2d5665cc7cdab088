"""Runs for whoever looks at them: made once, small, real."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from laconic.config import experiment_from

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": {"name": "fedavg", "local_epochs": 1}},
    "eden": {"method": {"name": "fedavg", "local_epochs": 1}, "link": {"up": "eden:bits=1"}},
    "fedsparse": {"method": {"name": "fedsparse", "local_epochs": 1}},
}


def make(out: Path, name: str, seed: int, *, rounds: int = 6, **sections: Any) -> Path:
    """A small run on the digits."""
    table: dict[str, dict[str, Any]] = {
        "run": {"name": f"{name}-{seed}", "seed": seed, "rounds": rounds, "cohort": 3, "eval_every": 2, "workers": 0},
        "data": {"source": "digits", "clients": 12, "partition": {"kind": "dirichlet", "alpha": 0.5}},
        "model": {"name": "mlp", "hidden": [8]},
        "link": {},
        "newcomer": {},
        **METHODS.get(name, {}),
        **sections,
    }
    made = experiment_from(table).run(out=out)
    assert made.directory is not None
    return made.directory


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, two seeds each."""
    out = tmp_path_factory.mktemp("made")
    for name in METHODS:
        for seed in (0, 1):
            make(out, name, seed)
    return out


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """The same, to be changed at will."""
    return Path(shutil.copytree(made, tmp_path / "runs"))
