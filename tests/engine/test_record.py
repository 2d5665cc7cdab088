"""Records: typed, flat as a mapping, lines of metrics.jsonl of both versions; and clients cannot name an evaluation."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pandas
import pytest

import laconic as lc
from laconic.core import Method, Update, tree_sha256
from laconic.engine import SCHEMA, Record, Rejection
from laconic.report import describe_run, read_run

FULL = Record(
    3,
    {"cohort": 4, "replies": 3, "rejected": 1, "bytes_up": 120, "bytes_down": 160, "late": 1},
    {"train_loss": 0.5},
    {"global_accuracy": 0.9, "sparsity/fc1": 0.25},
    (Rejection(2, 3, "checksum", "the frame was altered"),),
    "2 replies accepted, 4 needed",
    1.5,
)
LINE = {
    "schema": 2,
    "round": 3,
    "traffic": {"cohort": 4, "replies": 3, "rejected": 1, "bytes_up": 120, "bytes_down": 160, "late": 1},
    "clients": {"train_loss": 0.5},
    "evaluation": {"global_accuracy": 0.9, "sparsity/fc1": 0.25},
    "rejections": [{"client": 2, "round": 3, "reason": "checksum", "detail": "the frame was altered"}],
    "abandoned": "2 replies accepted, 4 needed",
    "seconds": 1.5,
}
FIRST = {
    **{"round": 3, "cohort": 4, "replies": 3, "rejected": 1, "bytes_up": 120, "bytes_down": 160, "late": 1},
    **{"train_loss": 0.5, "global_accuracy": 0.9, "sparsity/fc1": 0.25},
    **{"rejections": LINE["rejections"], "abandoned": LINE["abandoned"], "seconds": 1.5},
}
"""The same round as laconic 0.1 wrote it."""


def test_a_line_and_back() -> None:
    assert FULL.line() == LINE
    assert Record.read(json.loads(json.dumps(LINE))) == FULL
    plain = Record(1, {"bytes_up": 5, "bytes_down": 6})
    assert plain.line() == {"schema": SCHEMA, "round": 1, "traffic": {"bytes_up": 5, "bytes_down": 6}, "seconds": 0.0}
    assert Record.read(plain.line()) == plain


def test_a_line_of_the_first_version_says_the_same() -> None:
    assert Record.read(FIRST) == FULL


@pytest.mark.parametrize("schema", [1, 3, "2", 2.5])
def test_a_line_of_another_version_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=rf"a record of version {schema}, but this laconic knows 1 and 2"):
        Record.read({**LINE, "schema": schema})


@pytest.mark.parametrize("said", ["ones", "mask_entropy", "mean_pi", "open_gates", "gradients_sent", "adversary_loss"])
def test_what_clients_of_the_first_version_said_is_theirs(said: str) -> None:
    record = Record.read({**FIRST, said: 0.25})
    assert record.clients == {"train_loss": 0.5, said: 0.25}
    assert said not in record.evaluation


def test_as_a_mapping_it_is_flat() -> None:
    flat = dict(FULL)
    assert flat == {
        **{"round": 3, **LINE["traffic"], "clients/train_loss": 0.5, "global_accuracy": 0.9, "sparsity/fc1": 0.25},
        **{"rejections": LINE["rejections"], "abandoned": LINE["abandoned"], "seconds": 1.5},
    }
    assert len(FULL) == len(flat)
    assert FULL.get("train_loss") is None
    assert "abandoned" not in replace(FULL, abandoned="")
    assert list(pandas.DataFrame([FULL])["clients/train_loss"]) == [0.5]


def test_what_is_not_finite_is_null_in_lines_and_in_the_flat_view() -> None:
    record = replace(FULL, clients={"train_loss": math.nan}, evaluation={"global_loss": math.inf})
    assert record.line()["clients"] == {"train_loss": None}
    assert (record["clients/train_loss"], record["global_loss"]) == (None, None)
    json.dumps(record.line(), allow_nan=False)


def test_a_record_is_not_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        FULL.round = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        FULL["round"] = 4  # type: ignore[index]


def test_a_report_reads_both_versions(tmp_path: Path) -> None:
    """Also one file that holds both: a run of 0.1 that went on."""
    data = lc.data.digits(clients=4, limit=100)
    lc.fit(data=data, rounds=4, cohort=2, eval_every=2, workers=0, out=tmp_path, name="one")
    folder = tmp_path / "one"
    new = describe_run(read_run(folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    old = [
        {"round": line["round"], **line["traffic"], **line["clients"], **line.get("evaluation", {}), "seconds": 0.0}
        for line in lines
    ]
    for several in (old, [*old[:2], *lines[2:]]):
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in several))
        history = read_run(folder).history
        assert [record.clients.keys() for record in history] == [{"train_loss"}] * 4
        found = describe_run(read_run(folder))
        assert found["evaluations"] == new["evaluations"]
        assert found["traffic"] == new["traffic"]


@pytest.mark.parametrize("line", ['{"round": 1}', '{"schema": 7, "round": 1}', '{"schema": 2, "round": 1}', "[]"])
def test_a_line_that_is_none_is_one_sentence(tmp_path: Path, line: str) -> None:
    lc.fit(data=lc.data.digits(clients=4, limit=100), rounds=1, cohort=2, workers=0, out=tmp_path, name="one")
    (tmp_path / "one" / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(lc.DataError, match=r"one: "):
        describe_run(read_run(tmp_path / "one"))


# --- a client cannot name an evaluation ------------------------------------------------------------------------------


def boasting(method: Method, **metrics: float) -> Method:
    """A method whose clients say this of their training. (Through Flower: tests/flower/test_nodes.py.)"""

    def bind(task: Any, population: Any) -> Any:
        bound = method.bind(task, population)

        def client_update(*args: Any) -> Update:
            return replace(bound.client_update(*args), metrics=metrics)

        return replace(bound, client_update=client_update, client_metrics=None)  # and any word is heard

    return replace(method, bind=bind)


NAMES = ("validation_accuracy", "global_accuracy", "local_accuracy", "round", "bytes_up", "goal_round", "abandoned")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_client_says_changes_no_evaluation(toys: Any, name: str, workers: int) -> None:
    honest = list(toys.simulation(boasting(toys.hooked()), rounds=2, workers=workers))
    lying = list(toys.simulation(boasting(toys.hooked(), **{name: 7.0}), rounds=2, workers=workers))
    for record, other in zip(lying, honest, strict=True):
        assert record.clients == {name: 7.0}
        assert {**record, "seconds": 0} == {**other, f"clients/{name}": 7.0, "seconds": 0}
        assert Record.read(record.line()) == record


@pytest.mark.parametrize(("on", "metric"), [("test", "global_accuracy"), ("validation", "validation_accuracy")])
def test_what_a_client_says_ends_no_phase(on: Any, metric: str) -> None:
    data = lc.data.with_validation(lc.data.digits(clients=4, limit=200), fraction=0.2, seed=0)
    settings: dict[str, Any] = {"data": data, "rounds": 4, "cohort": 4, "eval_every": 1, "workers": 0}
    hopeless = lc.lg_fedavg(goal=1.0, goal_on=on, fedavg_rounds=9, lr=1e-6)
    honest = lc.fit(method=hopeless, **settings)
    lying = lc.fit(method=boasting(hopeless, **{metric: 1.0}), **settings)
    assert lying.history[-1][f"clients/{metric}"] == 1.0
    assert "goal_round" not in lying.summary
    assert lying.summary[metric] == honest.summary[metric] < 1.0
    assert lying.summary["state_sha256"] == honest.summary["state_sha256"]
    # And a goal that is reached is: the test above would pass where no phase ever ends.
    reached = lc.fit(method=lc.lg_fedavg(goal=0.01, goal_on=on, fedavg_rounds=9), **settings)
    assert reached.summary["goal_round"] == 1


def test_the_server_sees_the_same_whatever_clients_say(toys: Any) -> None:
    runs = [toys.simulation(boasting(toys.hooked(), **said)) for said in ({}, {"global_accuracy": 1.0})]
    for run in runs:
        list(run)
    assert tree_sha256(runs[0].state.server) == tree_sha256(runs[1].state.server)
