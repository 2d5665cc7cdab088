from pathlib import Path

import pytest

import laconic as lc
from laconic.report import find_runs, read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = lc.data.digits(clients=5)
    lc.fit(method="fedavg", data=data, rounds=2, cohort=2, workers=0, out=tmp_path, name="one")
    return tmp_path / "one"


def test_what_a_run_left(folder: Path) -> None:
    record = read_run(folder)
    assert (record.name, record.finished, len(record.history)) == ("one", True, 2)
    assert record.config["method"]["name"] == record.summary["method"] == "fedavg"


def test_a_run_that_is_going(folder: Path) -> None:
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "coh')
    record = read_run(folder)
    assert not record.finished
    assert [entry["round"] for entry in record.history] == [1, 2]


def test_folders(folder: Path) -> None:
    assert find_runs(folder) == find_runs(folder.parent) == [folder]
    assert find_runs(folder / "checkpoints") == []


def test_damage(folder: Path) -> None:
    (folder / "summary.json").write_text("{")
    with pytest.raises(lc.DataError, match=r"one: the run's files cannot be read"):
        read_run(folder)
