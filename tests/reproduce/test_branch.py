"""results/branch.py: a run that goes on from the first rounds of another."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laconic.config import experiment_from, read_table
from laconic.engine import Record
from laconic.report import read_run

SCRIPT = Path(__file__).parents[2] / "results" / "branch.py"
CONFIG = """
[run]
name = "NAME"
rounds = ROUNDS
cohort = 2
eval_every = 1
checkpoint_every = 1
workers = 0

[data]
source = "digits"
clients = 4
limit = 100

[model]
name = "mlp"
hidden = [8]

[method]
METHOD
local_epochs = 1
"""


@pytest.fixture
def branch() -> Callable[..., None]:
    return runpy.run_path(str(SCRIPT))["main"]


def config(folder: Path, name: str, method: str, *, rounds: int) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(CONFIG.replace("NAME", name).replace("ROUNDS", str(rounds)).replace("METHOD", method))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """LG-FedAvg after three rounds of phase A."""
    path = config(tmp_path, "source", 'name = "lg_fedavg"\nfedavg_rounds = 9', rounds=3)
    experiment_from(read_table(path)).run(out=tmp_path)
    return tmp_path / "source"


@pytest.mark.parametrize(
    "method", ['name = "lg_fedavg"\nfedavg_rounds = 3\nlg_lr = 0.05', 'name = "fedavg"\nweighting = "examples"']
)
def test_a_branch_ends_as_a_run_of_its_own(tmp_path: Path, source: Path, branch: Any, method: str) -> None:
    path = config(tmp_path, "branch", method, rounds=5)
    whole = experiment_from(read_table(path)).run()
    branch(source, 3, path, tmp_path, "branch")
    record: Record = read_run(tmp_path / "branch").history[-1]
    assert record.round == 3
    assert "global_accuracy" in record.evaluation
    assert not any(name.startswith("local_") for name in record.evaluation), "own models mean something else there"
    made = experiment_from(read_table(path)).run(out=tmp_path, resume=True)
    assert made.summary["state_sha256"] == whole.summary["state_sha256"]
    assert [record.round for record in made.history] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "method", ['name = "lg_fedavg"\nfedavg_rounds = 3\nlr = 0.3', 'name = "fedavg"', 'name = "lg_fedavg"\nmu = 0.1']
)
def test_another_first_phase_is_refused(tmp_path: Path, source: Path, branch: Any, method: str) -> None:
    with pytest.raises(SystemExit, match=r"differ in their data, .*the method of the first phase"):
        branch(source, 3, config(tmp_path, "branch", method, rounds=5), tmp_path, "branch")
