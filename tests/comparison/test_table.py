"""Means, deviations, targets, and how they are written."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from laconic.comparison import Comparison, Outcome, Target, cells
from laconic.core import ConfigError
from laconic.report import RunRecord


def run(name: str, seed: int, accuracies: list[float], **changes: Any) -> RunRecord:
    """A run of 1,000 bytes up and 3,000 down per round."""
    history = [
        {"round": number, "bytes_up": 1000, "bytes_down": 3000, "global_accuracy": accuracy}
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    summary = {
        "global_accuracy": accuracies[-1],
        "local_accuracy": 0.5,
        "global_loss": 1.0,
        "bytes_up": 1000 * len(history),
        "bytes_down": 3000 * len(history),
        "bits_per_parameter_up": 8.0,
        "bits_per_parameter_down": 24.0,
        "parameters": 1000,
        "final_parameters": 1000,
        "final_nonzero": 250,
        "model_bytes": 4321,
        "seconds": 1.5 + seed,
        **changes,
    }
    config = {"run": {"rounds": len(history), "seed": seed}, "model": {"hidden": [8]}}
    return RunRecord(Path(f"{name}-s{seed}"), config, history, summary)


def comparison(*runs: RunRecord, target: Target | None = None, failed: tuple[Outcome, ...] = ()) -> Comparison:
    named: dict[str, list[RunRecord]] = {outcome.entry: [] for outcome in failed}
    for record in runs:
        named.setdefault(record.name.partition("-")[0], []).append(record)
    ended = [Outcome(name, int(r.config["run"]["seed"]), r.path) for name, rs in named.items() for r in rs]
    return Comparison((*ended, *failed), named, target)


def test_means_and_deviations() -> None:
    (row,) = comparison(run("a", 0, [0.5, 0.8]), run("a", 1, [0.5, 0.9])).table
    assert row["name"] == "a"
    assert row["runs"] == 2
    assert row["global_accuracy"] == pytest.approx(0.85)
    assert row["global_accuracy_std"] == pytest.approx(0.1 / 2**0.5)  # of a sample: n - 1
    assert (row["bytes_up"], row["bytes_down"], row["bytes_total"]) == (2000, 6000, 8000)
    assert row["bytes_up_std"] == 0
    assert row["sparsity"] == 0.75
    assert row["model_bytes"] == 4321
    assert row["new_accuracy"] is None
    assert row["bytes_to_target"] is None


def test_one_seed_has_no_deviation() -> None:
    (row,) = comparison(run("a", 0, [0.8])).table
    assert row["global_accuracy_std"] is None


def test_bytes_to_reach_a_target() -> None:
    target = Target.parse(0.8)
    a, b = comparison(
        run("a", 0, [0.5, 0.8, 0.9]),
        run("a", 1, [0.8, 0.7, 0.9]),
        run("b", 0, [0.1, 0.2, 0.3]),
        run("b", 1, [0.1, 0.2, 0.85]),
        target=target,
    ).table
    assert (a["bytes_to_target"], a["reached_target"]) == (6000, 2)
    assert (b["bytes_to_target"], b["reached_target"]) == (12000, 1)


@pytest.mark.parametrize("text", ["high", "local_accuracy=", "=x", "0.9.1"])
def test_a_target_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="target is a number or figure=number"):
        Target.parse(text)


def test_cells_say_what_is_known() -> None:
    failed = (Outcome("b", 1, Path("b-s1"), "the moon was full"),)
    found = comparison(run("a", 0, [0.801]), run("a", 1, [0.9]), run("b", 0, [0.25]), target=Target(0.9), failed=failed)
    headings, lines = cells(found.table)
    rows = {line[0]: dict(zip(headings, line, strict=True)) for line in lines}
    assert set(rows) == {"a", "b (1 of 2 failed)"}
    assert rows["a"]["global accuracy"] == "85.05 ± 7.00 %"
    assert rows["a"]["up"] == "1.00 kB"  # no deviation to speak of
    assert rows["a"]["to target"] == "4.00 kB (1 of 2)"
    assert rows["a"]["seconds"] == "2.0 ± 0.7"
    assert rows["b (1 of 2 failed)"]["to target"] == "–"
    assert "new accuracy" not in headings  # nobody knows
    assert "loss" not in headings  # accuracy says more
    assert "b, seed 1, failed: the moon was full" in found.notes()


def test_a_loss_where_there_is_no_accuracy() -> None:
    record = run("a", 0, [0.5], global_accuracy=None, local_accuracy=None, global_loss=0.125)
    headings, lines = cells(comparison(record).table)
    assert dict(zip(headings, lines[0], strict=True))["loss"] == "0.125"


def test_an_entry_of_which_nothing_is_left() -> None:
    found = comparison(run("a", 0, [0.5]), failed=(Outcome("b", 0, Path("b-s0"), "no luck"),))
    _, lines = cells(found.table)
    assert {line[0] for line in lines} == {"a", "b (1 of 1 failed)"}
    assert set(lines[0][1:]) == {"–"}  # entries that failed were named first
    assert "| b (1 of 1 failed) | – |" in found.to_markdown()


def test_comma_separated_values_are_whole_numbers_and_names() -> None:
    found = comparison(run("a", 0, [1 / 3]), run("b", 0, [0.5]))
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["name"] for row in rows] == ["a", "b"]
    assert float(rows[0]["global_accuracy"]) == 1 / 3
    assert rows[0]["new_accuracy"] == ""


def test_conditions_that_differ_are_named() -> None:
    wide = run("b", 0, [0.5, 0.6])
    wide.config["model"]["hidden"] = [256]  # type: ignore[index]
    found = comparison(run("a", 0, [0.5]), wide)
    assert found.unequal() == {"run.rounds": {"a": 1, "b": 2}, "model.hidden": {"a": [8], "b": [256]}}
    assert "not equal: model.hidden (a: [8]; b: [256])" in found.notes()
    assert comparison(run("a", 0, [0.5]), wide, run("a", 1, [0.5]), run("b", 1, [0.5])).unequal(), "of the first seed"
    assert comparison(run("a", 0, [0.5]), run("b", 1, [0.5])).unequal() == {}, "no seed in common"
    assert comparison(run("a", 0, [0.5]), run("b", 0, [0.5])).unequal() == {}
