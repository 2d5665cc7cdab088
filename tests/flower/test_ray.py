"""Flower's simulation on Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.flower.conftest import table_for

from laconic.config import experiment_from


def on_ray(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The summary of `laconic run --engine flower-sim`: a process of its own, as users start it."""
    file = folder / "run.toml"
    file.write_text(tomli_w.dumps({k: v for k, v in table.items() if v}))
    command = [
        str(Path(sys.executable).with_name("laconic")),
        "run",
        str(file),
        "--engine",
        "flower-sim",
        "--out",
        str(folder),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads((folder / table["run"]["name"] / "summary.json").read_text()))


def test_a_run_on_ray_ends_in_the_state_of_the_embedded_engine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra flower")
    table = table_for("lg_fedavg", rounds=2)
    summary, embedded = on_ray(table, tmp_path), experiment_from(table).run().summary
    for key in ("state_sha256", "bytes_up", "bytes_down", "local_accuracy"):
        assert summary[key] == embedded[key]
