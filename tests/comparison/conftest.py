from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.config import Table, sections


def small(**changes: dict[str, Any]) -> Table:
    """A run of a second."""
    given: dict[str, dict[str, Any]] = {
        "run": {"rounds": 4, "cohort": 3, "eval_every": 2, "checkpoint_every": 1},
        "data": {"source": "digits", "clients": 6, "limit": 120},
        "model": {"name": "mlp", "hidden": [8]},
        "method": {"name": "fedavg", "local_epochs": 1},
    }
    return sections(
        {**given, **{name: {**given.get(name, {}), **more} for name, more in changes.items()}}, where="small"
    )


@pytest.fixture
def tables() -> list[tuple[str, Table]]:
    """Two entries that differ in one thing."""
    return [("whole", small()), ("2 bits", small(link={"up": "eden:bits=2"}))]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one, with a file of conditions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(
        """
[run]
name = "little"
rounds = 4
cohort = 3
eval_every = 2

[data]
source = "digits"
clients = 6
limit = 120

[model]
name = "mlp"
hidden = [8]

[method]
name = "fedavg"
local_epochs = 1
"""
    )
    return tmp_path
