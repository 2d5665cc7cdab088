"""Every example runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from laconic.config import experiment_from, read_tables

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    module = runpy.run_path(str(EXAMPLES / name))
    if name == "demo.py":
        module["main"](rounds=2, seeds=1)
    else:
        module["main"]()
    assert "%" in capsys.readouterr().out or name != "demo.py"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_configuration(name: str) -> None:
    for _, table in read_tables(EXAMPLES / name):
        experiment_from(table)
