"""The commands: thin, and with one sentence for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from laconic.cli import app
from laconic.core import ConfigError


def test_a_folder_and_its_certificates(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs the extra flower")
    folder = tmp_path / "app"
    made = CliRunner().invoke(app, ["deploy", "init", str(folder), "--config", str(config)])
    assert made.exit_code == 0, made.output
    assert "laconic deploy certs" in made.stderr
    made = CliRunner().invoke(app, ["deploy", "certs", str(folder), "--host", "fl.example.org"])
    assert made.exit_code == 0, made.output
    assert len(list((folder / "certs").glob("node-*.key"))) == 3


def test_insecure_is_warned_of(config: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "app"), "--config", str(config), "--insecure"])
    assert made.exit_code == 0, made.output
    assert "no encryption, and any node is admitted" in made.stderr


def test_the_doctor_says_what_is_wrong_and_exits_with_two(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "app"
    CliRunner().invoke(app, ["deploy", "init", str(folder), "--config", str(config)])
    (folder / "run.toml").write_text("[run]\nrouds = 3\n")
    said = CliRunner().invoke(app, ["doctor", str(folder)])
    assert said.exit_code == 2
    assert "rouds" in said.output


def test_without_flower_the_engine_says_what_to_install(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    monkeypatch.setitem(__import__("sys").modules, "flwr.app", None)
    result = CliRunner().invoke(app, ["run", str(config), "--engine", "flower-sim"])
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'laconic[flower]'" in str(result.exception)
