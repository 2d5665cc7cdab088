"""A finished run is given more rounds; a run ends before its last round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import laconic as lc
from laconic.core import ConfigError, RunError
from laconic.engine import Run, Stop


def run(out: Path | None = None, **settings: Any) -> Run:
    """A few rounds on the digits, clients with a memory of what their codec left out."""
    method = settings.pop("method", "fedavg")
    given = {"rounds": 4, "cohort": 3, "eval_every": 2, "workers": 0, "up": "ef(topk:fraction=0.1)", **settings}
    return lc.fit(data=lc.data.digits(clients=6), method=method, out=out, **given)


def lines(result: Run) -> list[Any]:
    """Everything of the records but the time that rounds took."""
    return [{k: v for k, v in record.line().items() if k != "seconds"} for record in result.history]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eval_every": 3},
        {"evaluations": ("global", "ensemble")},
        {"checkpoint_every": 3, "eval_every": 3},
        {"method": lc.ditto(), "store": "disk"},
    ],
    ids=["as it was evaluated", "last round again", "ensemble", "checkpoints", "on disk"],
)
def test_more_rounds_give_what_they_would_have_given_at_first(tmp_path: Path, settings: dict[str, Any]) -> None:
    run(tmp_path / "a", **settings)
    longer = run(tmp_path / "a", resume=True, rounds=7, **settings)
    at_first = run(tmp_path / "b", rounds=7, **settings)
    assert lines(longer) == lines(at_first)
    assert longer.summary["state_sha256"] == at_first.summary["state_sha256"]
    assert {**longer.summary, "seconds": 0} == {**at_first.summary, "seconds": 0}
    assert (tmp_path / "a/run/model.lac").read_bytes() == (tmp_path / "b/run/model.lac").read_bytes()


def test_fewer_rounds_and_other_settings_are_refused(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(RunError, match=r"run\.rounds was 4 and is 3 now"):
        run(tmp_path, resume=True, rounds=3)
    with pytest.raises(RunError, match=r"run\.cohort was 3"):
        run(tmp_path, resume=True, rounds=6, cohort=2)


@pytest.mark.parametrize(
    ("stop", "why", "rounds"),
    [
        ({"target": 0.3}, "target", None),
        ({"metric": "global_loss", "target": 2.2, "lower": True}, "target", None),
        ({"metric": "global_loss", "patience": 2}, "patience", 3),
        ({"bytes": 1}, "bytes", 1),
    ],
)
def test_a_run_ends_early(tmp_path: Path, stop: dict[str, Any], why: str, rounds: int | None) -> None:
    early = run(tmp_path, rounds=12, eval_every=1, stop=stop, evaluations=("global", "local", "ensemble"), up="float32")
    assert early.summary["stopped"] == why
    assert early.summary["rounds"] < 12
    assert rounds is None or early.summary["rounds"] == rounds
    assert "new_accuracy" in early.history[-1].evaluation
    again = run(
        tmp_path,
        rounds=12,
        eval_every=1,
        stop=stop,
        evaluations=("global", "local", "ensemble"),
        up="float32",
        resume=True,
    )
    assert again.summary["state_sha256"] == early.summary["state_sha256"]
    assert again.summary["rounds"] == early.summary["rounds"]


def test_what_stop_cannot_be() -> None:
    with pytest.raises(ConfigError, match="stop needs a target"):
        Stop()
    with pytest.raises(ConfigError, match="at least 1"):
        Stop(patience=0)
    with pytest.raises(ConfigError, match="no evaluation finds 'global_f1'"):
        run(stop=Stop(metric="global_f1", target=1.0))
