"""`laconic reproduce`: what it prints and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from laconic.reproduce import recipes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_from_the_command_line(laconic: Any, folder: Path) -> None:
    said = laconic("reproduce", "lg-theory", "--scale", 0.02, "--seed", 3)
    assert said.code == 0
    record = json.loads((folder / "results/lg-theory/result.json").read_text())
    assert record["command"] == "laconic reproduce lg-theory --scale 0.02 --seed 3"
    assert record["seed"] == 3
    lines = said.out.splitlines()
    assert len(lines) == len(record["rows"]) + 2
    assert lines[0].split() == ["ours", "paper", "expected", "tolerance", "within"]
    assert lines[1].startswith("error at α = 0")
    assert re.split(r"\s{2,}", lines[-1]) == ["files", "results/lg-theory"]


def test_the_list_says_what_was_run(laconic: Any, folder: Path) -> None:
    said = laconic("reproduce", "--list")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].split() == ["recipe", "what", "it", "reproduces", "scale", "takes", "result"]
    assert {line.split()[0] for line in lines[1:] if not line.startswith(" ")} == set(recipes)
    assert not [line for line in lines[1:] if "within" in line]
    assert not list(folder.iterdir())
    (folder / "out/lg-theory").mkdir(parents=True)
    record = {"rows": [{"within": True}, {"within": None}, {"within": False}], "scale": 0.5, "seconds": 8.2}
    (folder / "out/lg-theory/result.json").write_text(json.dumps(record))
    lines = laconic("reproduce", "--list", "--out", "out").out.splitlines()
    (found,) = [line for line in lines if "within" in line]
    assert found.startswith("lg-theory")
    assert found.rstrip().endswith("1 of 2 within, scale 0.5, 9 s: out/lg-theory/table.md")


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        (["fedpm-privcy"], "unknown recipe 'fedpm-privcy'; did you mean 'fedpm-privacy'?"),
        (["zzz"], "unknown recipe 'zzz'; known: codecs, em, fedpm-cifar10"),
        ([], "which recipe? laconic reproduce --list shows them."),
        (["lg-theory", "--list"], "--list takes no recipe, got 'lg-theory'."),
        (["lg-theory", "--scale", "0"], "scale must be in (0, 1], got 0.0"),
        (["lg-theory", "--scale", "7"], "scale must be in (0, 1], got 7.0"),
        (["lg-theory", "--seed", "-1"], "seed must be ≥ 0, got -1"),
    ],
)
def test_mistakes_are_one_sentence(laconic: Any, folder: Path, words: list[str], piece: str) -> None:
    said = laconic("reproduce", *words)
    assert said.code == 2
    assert said.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", said.err)
    assert piece in said.err
    assert not list(folder.iterdir())
