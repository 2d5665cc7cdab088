"""From a run's files to what the page shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import laconic as lc
from laconic.engine import Record
from laconic.methods import methods
from laconic.report import RunRecord, describe, describe_run, find_runs, read_run
from laconic.report.describe import MOST_POINTS


def record(**changes: Any) -> RunRecord:
    """A run as its files say it, without files."""
    config = {"run": {"seed": 0, "rounds": 4}, "method": {"name": "fedavg"}, "data": {"source": "digits"}}
    history = [Record(1, {"bytes_up": 10, "bytes_down": 100}, evaluation={"global_loss": 1.0}, seconds=0.5)]
    return replace(RunRecord(Path("runs/one"), config, history, None), **changes)


def rounds(number: int, **figures: Any) -> list[Record]:
    found = {"global_loss": 1.0, **figures}
    return [Record(i + 1, {"bytes_up": 10 + i, "bytes_down": 1}, evaluation=found) for i in range(number)]


def test_curves_are_those_of_the_records(made: Path) -> None:
    run = read_run(made / "eden-0")
    found = describe_run(run)
    evaluated = [r for r in run.history if "global_accuracy" in r]
    assert found["evaluations"]["round"] == [2, 4, 6] == [r["round"] for r in evaluated]
    figures = found["evaluations"]["figures"]
    assert figures["global_accuracy"] == pytest.approx([r["global_accuracy"] for r in evaluated])
    for way in ("up", "down"):
        spent = [sum(r[f"bytes_{way}"] for r in run.history[:n]) for n in (2, 4, 6)]
        assert found["evaluations"][way] == spent
        assert found["totals"][way] == spent[-1] == run.summary[f"bytes_{way}"]  # type: ignore[index]
        assert found["traffic"][way] == [r[f"bytes_{way}"] for r in run.history]
    assert found["state"] == "finished"
    assert found["command"] == f"laconic run {made / 'eden-0' / 'config.toml'} --out repeated"


def test_the_spread_over_clients_is_there(made: Path) -> None:
    figures = describe_run(read_run(made / "fedavg-0"))["evaluations"]["figures"]
    at = {q: figures[f"local_accuracy_{q}"][-1] for q in ("worst_decile", "p0", "p10", "p50", "p90", "p100")}
    assert 0 <= at["p0"] <= at["p10"] <= at["p50"] <= at["p90"] <= at["p100"] <= 1
    assert at["p0"] <= at["worst_decile"] <= at["p50"]


def test_sparsity_by_layer_is_the_models_own_and_in_old_records_what_methods_said() -> None:
    """Records of 0.1 have only what is left; where the model was counted, a method's own word does not go before."""
    for word in ("nonzero", "kept"):
        history = rounds(1, **{word: 0.25, f"{word}/fc1": 0.5})
        found = describe_run(record(history=history))["evaluations"]["figures"]
        assert (found["sparsity"], found["sparsity/fc1"]) == ([0.75], [0.5])
        counted = rounds(1, **{word: 0.25, f"{word}/fc1": 0.5, "sparsity": 0.7, "sparsity/fc1": 0.4})
        found = describe_run(record(history=counted))["evaluations"]["figures"]
        assert (found["sparsity"], found["sparsity/fc1"]) == ([0.7], [0.4])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedsparse", {"lambda0": 1e-3, "threshold_lr": 1e-2}),
        ("fedsparse", {"lambda0": 1e-3, "threshold_lr": 1e-2, "structured": False}),
        ("fedpm", {}),
        ("fedpm", {"evaluate": "ensemble", "samples": 2}),
        ("vardrop", {"local_steps": 4}),
        ("lg_fedsparse", {"lambda0": 1e-3, "threshold_lr": 1e-2}),
        ("fedavg", {}),
    ],
)
def test_table_report_record_and_model_agree_on_sparsity(tmp_path: Path, method: str, settings: dict[str, Any]) -> None:
    """One meaning: the share of the architecture's parameters that are gone from the final model, cut off or 0."""
    data = lc.data.digits(clients=4, limit=200)
    entry = {"mine": {"method": methods.build(method, settings)}}
    found = lc.compare(entry, data=data, seeds=1, rounds=6, cohort=4, eval_every=3, out=tmp_path, progress=False)
    (run,) = found.runs["mine"]
    weights = safetensors.torch.load_file(tmp_path / "mine-s0" / "model.safetensors")
    left = sum(int(leaf.count_nonzero()) for leaf in weights.values())
    members = 2 if "samples" in settings else 1
    truth = 1 - left / (members * run.summary["parameters"])  # type: ignore[index]
    if method == "fedavg":
        assert truth == 0.0
        assert "sparsity" not in run.history[-1]
    else:
        assert truth > 0.0
        assert run.history[-1]["sparsity"] == pytest.approx(truth)
        assert run.summary["sparsity"] == pytest.approx(truth)  # type: ignore[index]
    assert found.table[0]["sparsity"] == pytest.approx(truth)
    assert f"{100 * truth:.2f} %" in found.to_markdown()
    described = describe_run(read_run(tmp_path / "mine-s0"))
    assert described["totals"]["sparsity"] == pytest.approx(truth, rel=1e-6)
    if method != "fedavg":
        assert described["evaluations"]["figures"]["sparsity"][-1] == described["totals"]["sparsity"]


def test_before_anything_is_gone_the_curve_is_at_zero() -> None:
    history = rounds(3)
    history[2] = replace(history[2], evaluation={"global_loss": 1.0, "sparsity": 0.5, "sparsity/fc1": 0.25})
    figures = describe_run(record(history=history))["evaluations"]["figures"]
    assert figures == {"global_loss": [1, 1, 1], "sparsity": [0, 0, 0.5], "sparsity/fc1": [0, 0, 0.25]}
    assert "sparsity" not in describe_run(record(history=rounds(3)))["evaluations"]["figures"]


def test_a_seed_of_which_nothing_is_gone_counts_as_zero_beside_the_others() -> None:
    sparse = record(history=rounds(2, sparsity=0.5, **{"sparsity/fc1": 0.25}))
    dense = record(history=rounds(2), config={**sparse.config, "run": {"seed": 1, "rounds": 4}})
    other = record(history=rounds(2), config={**sparse.config, "method": {"name": "fedprox"}})
    described = [describe_run(run) for run in (sparse, dense, other)]
    found = [run["evaluations"]["figures"] for run in describe(described)["runs"]]
    assert [figures.get("sparsity") for figures in found] == [[0.5, 0.5], [0, 0], None]
    assert [figures.get("sparsity/fc1") for figures in found] == [[0.25, 0.25], [0, 0], None]
    assert "sparsity" not in described[1]["evaluations"]["figures"], "what is given is left as it is"


def test_layers_are_gone_by_so_much(tmp_path: Path) -> None:
    data = lc.data.digits(clients=4, limit=200)
    run = lc.fit(method=lc.fedpm(), data=data, rounds=2, cohort=4, workers=0)
    for layer in ("fc1", "fc2"):
        module = run.model.get_submodule(layer)
        left, size = (sum(map(count, module.parameters())) for count in (torch.count_nonzero, torch.numel))
        assert run.history[-1][f"sparsity/{layer}"] == pytest.approx(1 - float(left) / size)


def test_runs_that_differ_in_their_seed_are_one_group(made: Path) -> None:
    data = describe([describe_run(read_run(path)) for path in find_runs(made)])
    assert [group["label"] for group in data["groups"]] == ["fedavg ↑ eden:bits=1", "fedavg", "fedsparse"]
    assert [run["group"] for run in data["runs"]] == [0, 0, 1, 1, 2, 2]
    assert data["title"] == "3 settings on digits"
    assert {"link.up", "method.name"} <= set(data["different"])
    assert not {"run.seed", "run.name", "data.seed"} & set(data["different"])
    # Each seed has a split of its own, which all methods share.
    assert len(data["splits"]) == 2
    assert [run["split"] for run in data["runs"]] == [0, 1] * 3
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_groups_of_one_method_are_told_apart() -> None:
    runs = []
    for mu in (0.1, 0.2):
        config = {"run": {"seed": 0}, "method": {"name": "fedprox", "mu": mu}}
        runs.append(describe_run(record(config=config)))
    labels = [group["label"] for group in describe(runs)["groups"]]
    assert labels == ["fedprox, mu=0.1", "fedprox, mu=0.2"]
    for i, run in enumerate(runs):
        run["settings"]["method.settings"] = f"{i}" * 100  # too long for a name
        run["name"] = f"run-{i}"
    assert [g["label"] for g in describe(runs)["groups"]] == ["fedprox (run-0)", "fedprox (run-1)"]


def test_long_runs_are_thinned_without_a_word_that_is_wrong() -> None:
    history = rounds(3 * MOST_POINTS + 1)
    found = describe_run(record(history=history))
    evaluations, traffic = found["evaluations"], found["traffic"]
    assert evaluations["every"] == 4
    assert len(evaluations["round"]) <= MOST_POINTS
    assert (evaluations["round"][:2], evaluations["round"][-1]) == ([1, 5], len(history))
    # What was spent by then counts all rounds, also those that are not shown.
    assert evaluations["up"][1] == 10 + 11 + 12 + 13 + 14
    assert traffic["width"] == 4
    assert (traffic["round"][0], traffic["up"][0]) == (4, 11.5)
    assert sum(traffic["up"][:-1]) * 4 + traffic["up"][-1] == pytest.approx(
        sum(r["bytes_up"] for r in history), rel=1e-6
    )


def test_short_runs_are_shown_whole() -> None:
    found = describe_run(record(history=rounds(MOST_POINTS)))
    assert (found["evaluations"]["every"], found["traffic"]["width"]) == (1, 1)
    assert len(found["evaluations"]["round"]) == len(found["traffic"]["round"]) == MOST_POINTS


def test_a_run_that_has_just_begun() -> None:
    found = describe_run(record(history=[], running=True))
    assert (found["state"], found["round"], found["rounds"], found["totals"]["up"]) == ("running", 0, 4, 0)
    assert describe([found])["title"] == "fedavg on digits"


def test_figures_that_are_absent_or_not_finite() -> None:
    history = rounds(2, global_accuracy=None)
    history[1] = replace(history[1], evaluation={**history[1].evaluation, "global_loss": float("nan")})
    found = describe_run(record(history=history))
    assert found["evaluations"]["figures"] == {"global_loss": [1, None], "global_accuracy": [None, None]}


def test_a_run_made_from_python_says_so(tmp_path: Path) -> None:
    lc.fit(data=lc.data.digits(clients=5), rounds=1, cohort=2, workers=0, out=tmp_path, name="own")
    found = describe_run(read_run(tmp_path / "own"))
    assert found["command"] is None
    assert describe([found])["title"] == "fedavg on digits"


@pytest.mark.parametrize(
    "changes",
    [
        {"history": [Record(1, {})]},
        {"history": [Record("x", {"bytes_up": 1, "bytes_down": 1})]},  # type: ignore[arg-type]
        {"history": [Record(1, {"bytes_up": None, "bytes_down": 1})]},  # type: ignore[dict-item]
        {"summary": {"versions": 3}},
        {"summary": {"rounds": [1]}},
    ],
)
def test_files_that_are_not_a_runs(changes: dict[str, Any]) -> None:
    with pytest.raises(lc.DataError, match=r"^runs/one: its files are not those of a run"):
        describe_run(record(**changes))
