"""What running a recipe leaves behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.core import ConfigError, RunError
from laconic.engine import versions
from laconic.reproduce import Job, Outcome, Recipe, Row, found, reproduce, runner

ROWS = (
    Row("good", 1.0, paper=1.01, tolerance=0.1),
    Row("bad", 2.0, paper=1.0, expected=1.5, tolerance=0.1, note="why"),
    Row("told", 3.0),
)


def draw(figure: Any) -> None:
    figure.subplots().plot([0, 1], [0, 1], label="line")


def small(job: Job) -> Outcome:
    return Outcome(ROWS, {"seed": job.seed, "scale": job.scale, "many": job.scaled(100)}, draw)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A recipe named `small` in place of all others; keywords change it."""

    def put(**changes: Any) -> None:
        made = replace(Recipe("small", "A table", small, {"many": 100}, {"good": 1.01}, seconds=1.0), **changes)
        monkeypatch.setattr(runner, "recipes", {made.name: made})

    put()
    return put


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def row(*values: Any) -> dict[str, Any]:
    return dict(zip(("label", "ours", "paper", "expected", "tolerance", "note", "within"), values, strict=True))


def test_the_files(recipe: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed: there is no figure to look at")
    result = reproduce("small", out=tmp_path / "new", scale=0.5, seed=7)
    assert result.folder == tmp_path / "new" / "small"
    assert names(result.folder) == ["figure.svg", "result.json", "table.md"]
    record = read(result.folder)
    assert record.pop("seconds") >= 0
    assert record.pop("processor_seconds") >= 0
    assert record == {
        "name": "small",
        "reproduces": "A table",
        "command": "laconic reproduce small --scale 0.5 --seed 7",
        "seed": 7,
        "scale": 0.5,
        "versions": versions(),
        "settings": {"many": 100},
        "paper": {"good": 1.01},
        "rows": [
            row("good", 1.0, 1.01, None, 0.1, "", True),
            row("bad", 2.0, 1.0, 1.5, 0.1, "why", False),
            row("told", 3.0, None, None, None, "", None),
        ],
        "figure": "figure.svg",
        "data": {"seed": 7, "scale": 0.5, "many": 50},
    }
    table = (result.folder / "table.md").read_text()
    assert "`laconic reproduce small --scale 0.5 --seed 7`" in table
    assert "| good | 1 | 1.01 | – | 0.1 | yes |  |\n" in table
    assert "| bad | 2 | 1 | 1.5 | 0.1 | **no** | why |\n" in table
    assert "| told | 3 | – | – | – | – |  |\n" in table
    assert "](figure.svg)" in table
    assert b"<svg" in (result.folder / "figure.svg").read_bytes()


def test_the_figure_is_the_same_every_time(recipe: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed: there is no figure to look at")
    first, second = (reproduce("small", out=tmp_path / each).folder for each in "ab")
    assert (first / "figure.svg").read_bytes() == (second / "figure.svg").read_bytes()


def test_without_matplotlib_the_figure_is_left_out_and_the_result_says_so(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "figure.svg").write_text("of another run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reproduce("small", out=tmp_path)
    assert names(folder) == ["result.json", "table.md"]
    assert 'pip install "laconic[report]"' in read(folder)["figure"]
    assert (
        'Figure left out: drawing needs matplotlib; run: pip install "laconic[report]".'
        in (folder / "table.md").read_text()
    )


def test_a_recipe_without_a_figure(recipe: Any, tmp_path: Path) -> None:
    recipe(run=lambda job: Outcome(ROWS))
    folder = reproduce("small", out=tmp_path).folder
    assert names(folder) == ["result.json", "table.md"]
    assert read(folder)["figure"] == "none"
    assert "igure" not in (folder / "table.md").read_text()


def test_recipes_run_in_one_thread_and_leave_the_number_alone(recipe: Any, tmp_path: Path) -> None:
    before, during = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        recipe(run=lambda job: during.append(torch.get_num_threads()) or Outcome(ROWS))
        reproduce("small", out=tmp_path)
        assert during == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_recipes_own_scale_is_the_default(recipe: Any, tmp_path: Path) -> None:
    recipe(scale=0.2)
    assert read(reproduce("small", out=tmp_path).folder)["data"]["many"] == 20


def test_a_recipe_that_fails_leaves_the_old_result(recipe: Any, tmp_path: Path) -> None:
    folder = reproduce("small", out=tmp_path).folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(job: Job) -> Outcome:
        raise ConfigError("no data")

    recipe(run=fail)
    with pytest.raises(ConfigError, match="no data"):
        reproduce("small", out=tmp_path)
    recipe(run=lambda job: Outcome((Row("x", float("nan")),)))
    with pytest.raises(RunError, match="a figure is not finite"):
        reproduce("small", out=tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_result_that_was_cut_short_does_not_count(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = reproduce("small", out=tmp_path).folder
    assert found(tmp_path, "small") == (2, 1, 1.0, read(folder)["seconds"])
    write, left = runner.write_atomically, [1]

    def stop(path: Path, data: bytes) -> None:
        if not left.pop():
            raise KeyboardInterrupt
        left.append(0)
        write(path, data)

    monkeypatch.setattr(runner, "write_atomically", stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce("small", out=tmp_path, seed=1)
    assert found(tmp_path, "small") is None


def test_results_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    assert found(tmp_path, "small") is None
    (tmp_path / "small").mkdir()
    for text in ("", "[]", "{}", '{"rows": 3}', '{"rows": [{}]}', '{"rows": [], "scale": "x", "seconds": 1}'):
        (tmp_path / "small" / "result.json").write_text(text)
        assert found(tmp_path, "small") is None, text


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.5, float("nan")])
def test_scales_that_are_refused(recipe: Any, tmp_path: Path, scale: float) -> None:
    with pytest.raises(ConfigError, match=r"scale must be in \(0, 1\], got"):
        reproduce("small", out=tmp_path, scale=scale)
    assert not list(tmp_path.iterdir())


def test_other_calls_that_are_refused(recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed must be ≥ 0, got -1"):
        reproduce("small", out=tmp_path, seed=-1)
    with pytest.raises(ConfigError, match="unknown recipe 'smal'; did you mean 'small'"):
        reproduce("smal", out=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        reproduce("small", out=tmp_path / "file")
