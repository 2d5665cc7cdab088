"""`lc.compare` and the command, on runs of a second."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import laconic as lc
from laconic.comparison.compare import _varied
from laconic.core import ConfigError
from laconic.experiment import RunSettings

SMALL: dict[str, Any] = {"seeds": 2, "rounds": 2, "cohort": 2, "eval_every": 1, "progress": False}


@pytest.fixture(scope="module")
def data() -> lc.Federation:
    return lc.data.digits(clients=4, limit=80)


def test_objects_and_their_names(data: lc.Federation) -> None:
    found = lc.compare([lc.fedavg(), "fedprox"], data=data, target=0.01, **SMALL)
    assert [(row["name"], row["runs"]) for row in found.table] == [("fedavg", 2), ("fedprox", 2)]
    assert found.runs["fedavg"][1].summary["seed"] == 1
    assert all(row["reached_target"] == 2 and row["local_accuracy"] is not None for row in found.table)
    assert found.unequal() == {}
    assert re.match(r"\|  \| global accuracy \|.*\n\|---\|", found.to_markdown())
    assert not found.failures


def test_an_entry_may_have_conditions_of_its_own(data: lc.Federation) -> None:
    entries: dict[str, Any] = {"wide": {"method": "fedavg", "model": "logistic"}, "few bits": {"up": "eden:bits=2"}}
    found = lc.compare(entries, data=data, **SMALL)
    assert found.unequal() == {"model.name": {"wide": "logistic", "few bits": "mlp"}}
    wide, few = found.table
    assert wide["bits_per_parameter_up"] > 32 > 8 > few["bits_per_parameter_up"]


def test_a_method_of_ones_own_and_data_by_seed() -> None:
    class Own:  # cannot be pickled: processes are forked
        def __call__(self, seed: int) -> lc.Federation:
            return lc.data.digits(clients=4, limit=80, seed=seed)

    found = lc.compare({"own": lc.fedavg(solver=lc.Solver(local_epochs=1))}, data=Own(), **SMALL)
    a, b = found.runs["own"]
    assert a.config["data"]["sha256"] != b.config["data"]["sha256"]


def test_the_same_call_again_repeats_nothing(data: lc.Federation, tmp_path: Path) -> None:
    lc.compare(["fedavg"], data=data, out=tmp_path, **SMALL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    again = lc.compare(["fedavg"], data=data, out=tmp_path, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")} == before
    assert again.folder == tmp_path
    with pytest.raises(lc.RunError, match=r"data.sha256 was"):
        lc.compare(["fedavg"], data=lc.data.digits(clients=4, limit=90), out=tmp_path, **SMALL)


@pytest.mark.parametrize(
    ("entries", "more", "said"),
    [
        ([], {}, "nothing to compare"),
        (["fedavg", "fedavg"], {}, "2 entries are called 'fedavg'"),
        (["fedavgg"], {}, "did you mean 'fedavg'"),
        (["fedavg"], {"seeds": 0}, "seeds are a number of them"),
        (["fedavg"], {"seeds": [1, 1]}, "seeds are a number of them"),
        (["fedavg"], {"seeds": [-1]}, "seeds are a number of them"),
        (["fedavg"], {"round": 3}, "unknown condition 'round'; did you mean 'rounds'"),
        (["fedavg"], {"cohort": 9}, "only 4 clients"),
        (["fedavg"], {"processes": -1}, "processes must be"),
        (["fedavg"], {"target": "soon"}, "target is a number"),
        ([lc.fedavg], {}, "method must be a Method or a name, got a function (fedavg); call it: fedavg()."),
        ({"mine": lc.fedavg}, {}, "method must be a Method or a name, got a function (fedavg); call it: fedavg()."),
        (["fedavg"], {"rounds": "3"}, "compare: rounds: should be a valid integer, got '3'."),
        (["fedavg"], {"evaluations": ["globl"]}, "unknown evaluation 'globl'; did you mean 'global'?"),
        (["fedavg"], {"new_test": True}, 'compare: new_test is no more; add "ensemble" to run.evaluations.'),
    ],
)
def test_mistakes_are_said_before_anything_runs(
    data: lc.Federation, tmp_path: Path, entries: Any, more: dict[str, Any], said: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=re.escape(said)):
        lc.compare(entries, data=data, out=out, **{**SMALL, **more})
    assert not out.exists()


def test_conditions_are_what_fit_takes(data: lc.Federation) -> None:
    parameters = {name for name, p in inspect.signature(lc.fit).parameters.items() if p.kind is p.KEYWORD_ONLY}
    taken = parameters | {field.name for field in fields(RunSettings)}
    ours = {"data", "seed", "workers", "out", "name", "resume", "overwrite", "observer"}
    assert _varied(dict.fromkeys(taken - ours), "fedavg").keys() == taken - ours
    for name in ours:
        with pytest.raises(ConfigError, match=f"unknown condition '{name}'"):
            _varied({}, {name: None})


def test_no_ensemble_is_made_unless_asked_for(data: lc.Federation, work: Path, laconic: Any) -> None:
    """It costs a prediction of every client's model: no comparison has it by itself."""
    plain = lc.compare(["lg_fedavg"], data=data, **SMALL)
    assert plain.table[0]["new_accuracy"] is None
    assert not any("new" in name or "vote" in name for run in plain.runs["lg_fedavg"] for name in run.history[-1])
    asked = lc.compare(["lg_fedavg"], data=data, evaluations=["global", "local", "ensemble"], **SMALL)
    assert asked.table[0]["new_accuracy"] is not None
    for overrides in ((), ("--set", 'run.evaluations=["ensemble", "global"]')):
        said = laconic("compare", "small.toml", "--seeds", "1", "--out", f"out{len(overrides)}", *overrides)
        assert said.code == 0, said.err
        (row,) = json.loads(Path(f"out{len(overrides)}", "table.json").read_text())["table"]
        assert (row["new_accuracy"] is not None) == bool(overrides)
        assert ("new accuracy" in said.out) == bool(overrides)


@pytest.mark.parametrize("processes", [1, 2, 0])
def test_a_clients_exception_costs_its_reply_however_many_cores_there_are(
    data: lc.Federation, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """Only with `processes = 0`, which is for debugging, it ends the run."""
    honest = lc.Federation.client

    def client(self: lc.Federation, number: int) -> Any:
        if number == 1:
            raise OSError("its disk is gone")
        return honest(self, number)

    monkeypatch.setattr(lc.Federation, "client", client)
    settings = {**SMALL, "cohort": 4, "seeds": 1}
    found = lc.compare(["fedavg"], data=data, processes=processes, **settings)
    if processes:
        assert found.runs["fedavg"][0].summary["rejected_for"] == {"client_error": 2}
    else:
        (failed,) = found.failures
        assert "OSError: its disk is gone" in str(failed.failure)


# --- pictures and frames ---------------------------------------------------------------------------------------------


def test_a_picture_has_a_line_for_every_entry(data: lc.Federation) -> None:
    import matplotlib.pyplot as plt

    found = lc.compare(["fedavg", "fedprox"], data=data, **SMALL)
    axes = found.plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fedavg", "fedprox"]
    assert axes.get_xscale() == "log"
    assert len(axes.lines) == 2 * 3  # the mean and two seeds
    first = found.runs["fedavg"][0].history
    assert list(axes.lines[1].get_xdata()) == [
        sum(record["bytes_up"] + record["bytes_down"] for record in first[: i + 1]) for i in range(2)
    ]
    with pytest.raises(ConfigError, match="no record has 'beauty'"):
        found.plot(metric="beauty")
    plt.close("all")


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(laconic: Any, work: Path) -> None:
    words = ("compare", "fedavg", "fedavg@eden:bits=2", "small.toml", "--base", "small.toml", "--seeds", "2")
    said = laconic(*words, "--target", "0.05", "--out", "out")
    assert said.code == 0, said.err
    assert sorted(path.name for path in Path("out").glob("*-s?")) == [
        *("fedavg-eden-bits-2-s0", "fedavg-eden-bits-2-s1", "fedavg-s0", "fedavg-s1", "little-s0", "little-s1"),
    ]
    found = json.loads(Path("out/table.json").read_text())
    assert [row["name"] for row in found["table"]] == ["fedavg", "fedavg@eden:bits=2", "little"]
    assert [run["seed"] for run in found["runs"]] == [0, 0, 0, 1, 1, 1]
    assert all(run["bytes_to_target"] for run in found["runs"])
    assert found["target"] == {"figure": "global_accuracy", "value": 0.05}
    assert {"fedavg", "fedavg@eden:bits=2", "little"} <= {line.split("  ")[0] for line in said.out.splitlines()}
    for name in ("table.md", "table.csv"):
        assert "fedavg@eden:bits=2" in Path("out", name).read_text()
    assert said.err.count("done in") == 6
    again = laconic(*words, "--target", "0.05", "--out", "out")
    assert again.code == 0
    assert again.err.count("was done already") == 6
    assert again.out == said.out


def test_a_sweep(laconic: Any, work: Path) -> None:
    sweep = '\n[sweep]\nlink.up = ["float32", "drive"]\n"method.lr" = [0.1, 0.2]\n'
    Path("sweep.toml").write_text(Path("small.toml").read_text() + sweep)
    said = laconic("compare", "sweep.toml", "--seeds", "7,5", "--set", "run.rounds=1", "--quiet", "--out", "out")
    assert (said.code, said.out, said.err) == (0, "", "")
    found = json.loads(Path("out/table.json").read_text())
    assert {run["seed"] for run in found["runs"]} == {5, 7}
    names = [row["name"] for row in found["table"]]
    assert names == ["up=float32, lr=0.1", "up=float32, lr=0.2", "up=drive, lr=0.1", "up=drive, lr=0.2"]
    refused = laconic("run", "sweep.toml")
    assert refused.code == 2
    assert "a [sweep] is many runs; run them with laconic compare sweep.toml" in refused.err


def test_a_run_that_fails_is_named_and_the_exit_code_says_so(
    laconic: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Path("small.toml").read_text()
    Path("wild.toml").write_text(
        small.replace('name = "little"', 'name = "wild"').replace(
            'name = "mlp"\nhidden = [8]', 'name = "mlp"\nhidden = [8]\nloss = "cursed:loss"'
        )
    )
    # A loss that ends the process, outside any client's local update to catch.
    Path("cursed.py").write_text(
        "import os\nimport torch.nn.functional as F\n\n"
        "def loss(output, target):\n"
        "    if output.requires_grad:\n        os._exit(9)\n    return F.cross_entropy(output, target)\n"
    )
    monkeypatch.syspath_prepend(str(work))
    said = laconic("compare", "small.toml", "wild.toml", "--seeds", "1", "--out", "out")
    assert said.code == 3
    assert "wild, seed 0, failed: its process ended with code 9" in said.out
    assert "wild (1 of 1 failed)" in said.out
    rows = json.loads(Path("out/table.json").read_text())["table"]
    assert [(row["name"], row["runs"]) for row in rows] == [("little", 1), ("wild", 0)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fedavgg",), "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (("fedavg", "fedavg"), "2 entries are called 'fedavg'"),
        (("fedprox:mu",), "settings are written key=value, got 'mu'"),
        (("fedprox:muu=1",), "unknown key 'muu'"),
        (("fedavg@edn",), "unknown codec 'edn'"),
        (("missing.toml",), "cannot read missing.toml"),
        (("fedavg", "--seeds", "many"), "--seeds takes whole numbers, got 'many'"),
        (("fedavg", "--processes", "some"), "--processes takes whole numbers, got 'some'"),
        (("fedavg", "--set", "run.round=1"), "unknown key 'round'"),
        (("fedavg", "--target", "good"), "target is a number"),
    ],
)
def test_mistakes_are_one_sentence(laconic: Any, work: Path, words: tuple[str, ...], said: str) -> None:
    found = laconic("compare", *words, "--out", "out")
    assert found.code == 2
    assert re.fullmatch(r"error: [^\n]+\n", found.err), found.err
    assert said in found.err
    assert not Path("out").exists()


def test_a_comparison_from_python_leaves_tables_and_a_page_with_its_entries_names(tmp_path: Path) -> None:
    entries = {"few & <bits>": {"method": "fedavg", "up": "eden:bits=2"}, "plain": lc.fedavg()}
    found = lc.compare(
        entries, data=lc.data.digits(clients=4), seeds=1, rounds=1, cohort=2, out=tmp_path, processes=0, progress=False
    )
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} >= {
        *(f"table.{suffix}" for suffix in ("md", "csv", "tex", "json")),
        "report.html",
    }
    page = (tmp_path / "report.html").read_text()
    assert '"label":"plain"' in page
    assert '"label":"few \\u0026 \\u003cbits\\u003e"' in page
    lines = found.to_latex().splitlines()
    assert lines[0].startswith(r"\begin{tabular}{lr")
    assert any(line.startswith(r"few \& <bits> &") and line.endswith(r"\\") for line in lines)
