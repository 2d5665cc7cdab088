"""The figures of a run, as TensorBoard reads them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from laconic.engine import Record

SMALL = """
[run]
name = "small"
rounds = 4
cohort = 2
eval_every = 2
checkpoint_every = 2
workers = 0

[data]
source = "digits"
clients = 4
limit = 80

[model]
name = "mlp"
hidden = [8]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SMALL)
    return "small.toml"


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def expected(folder: Path) -> dict[str, dict[int, float]]:
    made: dict[str, dict[int, float]] = {}
    total = 0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = Record.read(json.loads(line))
        total += record["bytes_up"] + record["bytes_down"]
        for name, value in {**record, "bytes_total": total}.items():
            if name != "round" and isinstance(value, int | float):
                made.setdefault(name, {})[record["round"]] = pytest.approx(value, rel=1e-6)
    return made


def test_every_number_of_every_round(laconic: Any, file: str) -> None:
    assert laconic("run", file, "--tensorboard", "--quiet").code == 0
    found = scalars(Path("runs/small/tensorboard"))
    assert found == expected(Path("runs/small"))
    assert list(found["global_accuracy"]) == [2, 4]
    assert list(found["clients/train_loss"]) == [1, 2, 3, 4]


def test_a_resumed_run_goes_on_in_the_same_log(laconic: Any, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.engine import RunDirectory

    append = RunDirectory.append

    def full(self: RunDirectory, record: Record) -> int:
        if record["round"] == 4:
            raise KeyboardInterrupt
        return append(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append", full)
        assert laconic("run", file, "--tensorboard", "--quiet").code == 130
    assert laconic("run", file, "--tensorboard", "--quiet", "--resume").code == 0
    assert scalars(Path("runs/small/tensorboard")) == expected(Path("runs/small"))


def test_in_comparisons(laconic: Any, file: str) -> None:
    assert laconic("compare", file, "--seeds", "1", "--tensorboard", "--quiet", "--out", "out").code == 0
    assert scalars(Path("out/small-s0/tensorboard")) == expected(Path("out/small-s0"))


def test_one_sentence_where_it_is_not_installed(laconic: Any, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for words in (("run", file), ("compare", file, "--out", "out")):
        said = laconic(*words, "--tensorboard")
        assert said.code == 2
        assert said.err == 'error: --tensorboard needs tensorboard; run: pip install "laconic[tensorboard]"\n'
    assert not Path("runs").exists()
    assert not Path("out").exists()
