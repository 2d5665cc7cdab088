"""Recipes that train: scales, records that are taken up, and what is missing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laconic.config import experiment_from, resolved, sections
from laconic.core import DataError, RunError
from laconic.reproduce import Arm, Figure, Training, recipes, reproduce, runner, runs_table, training, training_recipe
from laconic.reproduce.training import byte_share, last_evaluations, paper_share, summed_up

ROOT = Path(__file__).parent.parent.parent
COMMON = """
[run]
rounds = 20
cohort = 2
eval_every = 1
[data]
source = "digits"
clients = 4
[method]
name = "fedavg"
local_epochs = 1
"""
ACCURACY, BITS = "accuracy, %", "bits up"
TINY = Training(
    COMMON,
    (Arm("plain", (), {ACCURACY: 50.0}), Arm("eight", ("link.up=int8",), {ACCURACY: 50.0, BITS: 8.0})),
    (
        Figure(ACCURACY, last_evaluations, tolerance=60.0),
        Figure(BITS, summed_up("bits_per_parameter_up"), tolerance=4.0),
        Figure("bytes, %", byte_share),
        Figure("volume, %", paper_share),
    ),
    scale=0.1,
    small=("model.hidden=[8]",),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def put(made: Training = TINY) -> Path:
        monkeypatch.setattr(runner, "recipes", {"tiny": training_recipe("tiny", "A table", made, seconds=1.0)})
        return tmp_path / "results"

    return put


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr(training, "compare_tables", refuse)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of `tiny` that was trained once."""
    out = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "recipes", {"tiny": training_recipe("tiny", "A table", TINY, seconds=1.0)})
        reproduce("tiny", out=out)
    return out


def test_what_a_training_recipe_leaves(made: Path) -> None:
    record = json.loads((made / "tiny" / "result.json").read_text())
    assert record["scale"] == 0.1
    assert [row["label"] for row in record["rows"][:4]] == [
        "plain: accuracy, %",
        "plain: bits up",
        "plain: bytes, %",
        "plain: volume, %",
    ]
    assert record["rows"][0]["paper"] == 50.0
    assert record["rows"][1]["tolerance"] is None, "nothing to compare with"
    assert record["rows"][2]["ours"] == 100.0
    assert record["rows"][6]["ours"] < 70
    assert record["rows"][7]["ours"] == 100.0, "the paper's formula knows nothing of codecs"
    assert record["training_seconds"] > 0
    assert [run["record"] for run in record["data"]["runs"]] == ["plain-s0", "eight-s0"]
    assert {"plain-s0.toml", "plain-s0.jsonl", "plain-s0.summary.json"} <= {p.name for p in (made / "tiny").iterdir()}
    assert "| eight |" in (made / "tiny" / "table.md").read_text()


def test_finished_runs_are_not_repeated(made: Path, tiny: Any, no_training: None, tmp_path: Path) -> None:
    out = tiny()
    shutil.copytree(made, out)
    shutil.rmtree(out / "tiny" / "runs")
    before = json.loads((out / "tiny" / "result.json").read_text())
    result = reproduce("tiny", out=out)
    assert result.record["rows"] == before["rows"]


def test_records_elsewhere_are_taken_up(made: Path, tiny: Any, no_training: None, tmp_path: Path) -> None:
    out = tiny()
    result = reproduce("tiny", out=out, adopt=[made / "tiny" / "runs"])
    assert [row.label for row in result.rows][:1] == ["plain: accuracy, %"]
    moved = tiny()
    (moved / "other").mkdir()
    for path in (out / "tiny").glob("*-s0.*"):
        path.rename(moved / "other" / path.name.replace("plain", "under-another-name"))
    shutil.rmtree(out / "tiny")
    assert reproduce("tiny", out=moved).rows == result.rows


def test_another_configuration_is_not_taken_up(made: Path, tiny: Any, tmp_path: Path) -> None:
    changed = replace(TINY, common=COMMON.replace("local_epochs = 1", "local_epochs = 2"))
    with pytest.raises(RunError, match="no run of this recipe is finished in"):
        reproduce("tiny", out=tiny(changed), adopt=[made / "tiny"], train=False)


def test_a_result_of_what_is_there(made: Path, tiny: Any, no_training: None) -> None:
    out = tiny()
    (out / "tiny").mkdir(parents=True)
    for path in (made / "tiny").glob("eight-s0.*"):
        shutil.copy(path, out / "tiny")
    result = reproduce("tiny", out=out, train=False)
    assert {row.label for row in result.rows} == {"eight: accuracy, %", "eight: bits up"}, "no share without a first"
    assert result.record["data"]["missing"] == ["plain, seed 0"]
    assert result.record["command"].endswith("--no-train")
    assert "Not run: plain, seed 0." in (out / "tiny" / "table.md").read_text()


def test_an_arm_may_have_fewer_seeds_and_a_recipe_its_own_picture(tiny: Any) -> None:
    drawn: list[dict[str, int]] = []

    def picture(found: Any, figure: Any) -> None:
        drawn.append({name: len(runs) for name, runs in found.items()})

    plain, eight = TINY.arms
    out = tiny(replace(TINY, arms=(plain, replace(eight, seeds=1)), seeds=2, picture=picture))
    result = reproduce("tiny", out=out, scale=0.05)
    assert [run["record"] for run in result.record["data"]["runs"]] == ["plain-s0", "plain-s1", "eight-s0"]
    assert "2 seeds, standard deviation" in result.rows[0].note
    pytest.importorskip("matplotlib")
    assert drawn == [{"plain": 2, "eight": 1}]


def test_what_is_stated_for_a_small_scale_never_exceeds_the_full_number() -> None:
    stated = replace(TINY, arms=(replace(TINY.arms[0], small=("run.rounds=20",)),))
    assert [stated.table(stated.arms[0], scale=scale)["run"]["rounds"] for scale in (0.05, 0.1, 0.5)] == [10, 20, 20]


def test_scales() -> None:
    arm = TINY.arms[0]
    assert TINY.table(arm)["run"]["rounds"] == 20
    assert "hidden" not in TINY.table(arm)["model"]
    assert TINY.table(arm, scale=0.1)["run"]["rounds"] == 2
    assert TINY.table(arm, scale=0.1)["model"]["hidden"] == [8]
    stated = replace(TINY, small=("run.rounds=12",))
    assert [stated.table(arm, scale=scale)["run"]["rounds"] for scale in (1.0, 0.1, 0.05, 0.01)] == [20, 12, 6, 2]


@pytest.mark.parametrize("name", [name for name, recipe in recipes.items() if isinstance(recipe.run, Training)])
def test_every_configuration_is_valid_at_every_scale(name: str) -> None:
    recipe = recipes[name]
    assert isinstance(recipe.run, Training)
    labels = {figure.label for figure in recipe.run.figures}
    assert len({arm.name for arm in recipe.run.arms}) == len(recipe.run.arms)
    for arm in recipe.run.arms:
        assert set(arm.paper) <= labels, "a figure of the paper that nothing of ours stands beside"
        for scale in {1.0, recipe.scale, 0.01}:
            resolved(recipe.run.table(arm, scale=scale))


@pytest.mark.parametrize("name", ["fedsparse-cifar100", "fedsparse-femnist", "vardrop-svhn", "vardrop-gtsrb"])
def test_missing_data_is_said_by_the_loader(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path))
    with pytest.raises(DataError, match="LACONIC_DATA"):
        reproduce(name, out=tmp_path / "results", scale=0.01)
    assert not list((tmp_path / "results").iterdir()), "nothing half-written"


def test_what_is_recorded_in_results_belongs_to_its_recipe() -> None:
    """Every record of a recipe that trains is of one of its own configurations, and its result is of these records."""
    for path in sorted((ROOT / "results").glob("*/result.json")):
        record = json.loads(path.read_text())
        recipe = recipes[record["name"]]
        if not isinstance(recipe.run, Training):
            continue
        arms = {arm.name: arm for arm in recipe.run.arms}
        for run in record["data"]["runs"]:
            found = training._kept(
                training.Job(seed=0, scale=record["scale"], folder=path.parent),
                run["name"],
                recipe.run.table(arms[run["name"]], scale=record["scale"]),
                run["seed"],
            )
            assert found is not None, run["record"]
            assert found.summary is not None
            assert found.summary["state_sha256"] == run["state_sha256"]


def test_tables_of_pages_are_those_of_the_results() -> None:
    import runpy

    tables = runpy.run_path(str(ROOT / "results" / "tables.py"))
    for page in tables["PAGES"]:
        assert tables["filled"](page.read_text()) == page.read_text(), "run: python results/tables.py"


def test_seeds_are_averaged() -> None:
    runs = [{"name": "a", "seed": seed, "accuracy": 50.0 + seed, "bytes_up": 10, "bytes_down": 10} for seed in (0, 1)]
    assert runs_table(runs)[2].startswith("| a (2 seeds) | 50.50 % |")


def test_a_recipe_s_configuration_runs() -> None:
    """The smallest recipe of all on data that are on board, to its end."""
    table = TINY.table(TINY.arms[1], scale=0.05)
    experiment_from(sections(table, where="here")).run()
