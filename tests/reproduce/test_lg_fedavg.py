"""Figures and pictures of LG-FedAvg's recipes, on records that are made up where only their arithmetic matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.report import RunRecord
from laconic.reproduce import lg_fedavg as lg
from laconic.reproduce import recipes
from laconic.reproduce.training import Training


def record(method: str, *, rounds: int = 2, **summary: Any) -> RunRecord:
    lines = [
        {
            **{"round": n, "bytes_up": 100, "bytes_down": 200},
            **{"global_accuracy": 0.1 * n, "local_accuracy": 0.2 * n, "newcomer_accuracy": 0.3 * n},
        }
        for n in range(1, rounds + 1)
    ]
    figures = {"global_accuracy": 0.2, "local_accuracy": 0.4, "posthoc_auc_0": 0.6, "posthoc_auc_1": 0.7}
    return RunRecord(
        Path(method), {"method": {}}, lines, {"method": method, "rounds": rounds, "clients": 100, **figures, **summary}
    )


@pytest.mark.parametrize(
    ("method", "expected"), [("fedavg", 20.0), ("fedprox", 20.0), ("lg_fedavg", 40.0), ("local_only", 40.0)]
)
def test_whose_accuracy_counts(method: str, expected: float) -> None:
    """Without models of devices' own, both tests are of the server's model (§9.3)."""
    assert lg._local(record(method), None) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "arm", "size", "expected"),
    [
        ("lg-mnist", "fedavg", {"parameters": 633_226}, 50.5),
        ("lg-mnist", "lg", {"parameters": 633_226, "shared_parameters": 99_978.0}, 28.4),
        ("lg-mnist", "lg-two-layers", {"parameters": 633_226, "shared_parameters": 34_186.0}, 28.0),
        ("lg-mnist", "mtl", {"parameters": 633_226}, 50.7),
        ("lg-cifar10", "fedavg", {"parameters": 64_102}, 13.04),
        ("lg-cifar10", "lg", {"parameters": 64_102, "shared_parameters": 2_872.0}, 8.48),
        ("lg-cifar10", "mtl", {"parameters": 64_102}, 17.95),
    ],
)
def test_the_papers_volumes(name: str, arm: str, size: dict[str, float], expected: float) -> None:
    """The full-scale settings of an arm give the volume that the paper prints (§12)."""
    training = recipes[name].run
    assert isinstance(training, Training)
    table = training.table(next(each for each in training.arms if each.name == arm))
    run = record(table["method"]["name"], rounds=table["run"]["rounds"], cohort=table["run"]["cohort"], **size)
    found = lg._volume(RunRecord(run.path, table, run.history, run.summary), None)
    assert found == pytest.approx(expected, abs=0.06)
    assert lg._volume(record("local_only", parameters=1), None) is None


def test_pictures() -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def drawn(picture: Any, **found: RunRecord) -> Any:
        made = figure.Figure()
        picture({name.replace("_", "-"): [run] for name, run in found.items()}, made)
        (axes,) = made.axes
        return axes

    own = drawn(lg._own_models, fedavg=record("fedavg"), lg=record("lg_fedavg"), local=record("local_only"))
    assert [line.get_label() for line in own.lines] == ["fedavg", "lg"]
    assert [list(line.get_ydata()) for line in own.lines] == [[0.1, 0.2], [0.2, 0.4]]
    assert len(drawn(lg._own_models, local=record("local_only")).lines) == 1
    late = drawn(lg._newcomers, fedavg=record("fedavg"), lg=record("lg_fedavg"))
    assert [list(line.get_ydata()) for line in late.lines] == [
        pytest.approx(ys) for ys in ([10, 20], [30, 60], [20, 40], [30, 60])
    ]
    fair = {"fedavg": record("fedavg"), "lg": record("lg_fedavg"), "lg_strong_5.0": record("lg_fedavg")}
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in drawn(lg._trade_off, **fair).lines]
    assert points == [pytest.approx(at) for at in ((60, 20), (60, 40), (60, 40), (70, 20), (70, 40), (70, 40))]
