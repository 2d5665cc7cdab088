"""Records as curves, pictures and data frames."""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
import pandas
import pytest

import laconic as lc
from laconic.core import ConfigError
from laconic.engine import Point, bytes_to_reach, curve

HISTORY = [
    {"round": 1, "bytes_up": 1, "bytes_down": 10},
    {"round": 2, "bytes_up": 2, "bytes_down": 20, "global_accuracy": 0.5},
    {"round": 3, "bytes_up": 3, "bytes_down": 30},
    {"round": 4, "bytes_up": 4, "bytes_down": 40, "global_accuracy": None},
    {"round": 5, "bytes_up": 5, "bytes_down": 50, "global_accuracy": 0.9},
]


@pytest.fixture(scope="module")
def run() -> lc.Run:
    return lc.fit(data=lc.data.digits(clients=4, limit=80), rounds=4, cohort=2, eval_every=2, workers=0)


def test_a_curve_counts_all_bytes_until_then() -> None:
    assert curve(HISTORY) == [Point(2, 33, 0.5), Point(5, 165, 0.9)]


@pytest.mark.parametrize(("target", "num_bytes"), [(0.1, 33), (0.5, 33), (0.6, 165), (0.9, 165), (0.95, None)])
def test_bytes_until_a_target_is_reached(target: float, num_bytes: int | None) -> None:
    assert bytes_to_reach(HISTORY, target) == num_bytes


def test_a_run_is_drawn(run: lc.Run) -> None:
    axes = run.plot()
    (line,) = axes.lines
    assert list(line.get_ydata()) == [r["global_accuracy"] for r in run.history if "global_accuracy" in r]
    assert line.get_xdata()[-1] == run.summary["bytes_up"] + run.summary["bytes_down"]
    assert axes.get_ylabel() == "global accuracy"
    assert run.plot(metric="clients/train_loss", axes=axes) is axes
    assert len(axes.lines[-1].get_ydata()) == 4, "clients say it in every round"
    with pytest.raises(ConfigError, match="no record has 'train_loss'; was it evaluated"):
        run.plot(metric="train_loss")
    plt.close("all")


def test_records_go_straight_into_pandas(run: lc.Run) -> None:
    plain = pandas.DataFrame(run.history)
    assert list(plain["round"]) == [1, 2, 3, 4]
    assert plain["bytes_up"].sum() == run.summary["bytes_up"]
    frame = run.frame()
    assert list(frame.index) == [1, 2, 3, 4]
    assert frame["bytes_total"].iloc[-1] == run.summary["bytes_up"] + run.summary["bytes_down"]
    assert frame["global_accuracy"].count() == 2


@pytest.mark.parametrize(
    ("library", "said"), [("matplotlib.pyplot", "drawing needs matplotlib"), ("pandas", "a data frame")]
)
def test_one_sentence_where_a_library_is_missing(
    run: lc.Run, monkeypatch: pytest.MonkeyPatch, library: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf'{said}.*; run: pip install "laconic\[report\]"'):
        run.frame() if library == "pandas" else run.plot()
