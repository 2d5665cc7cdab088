"""The command line: what it writes, what it says, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

from laconic.cli import main
from laconic.engine import RunDirectory

SMALL = """
[run]
name = "small"
seed = 1
rounds = 4
cohort = 3
eval_every = 2
checkpoint_every = 2
workers = 0

[data]
source = "digits"
clients = 6
limit = 120

[model]
name = "mlp"
hidden = [8]

[method]
name = "fedavg"
local_epochs = 1
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run, in a folder of its own that is the current one."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "small.toml").write_text(SMALL)
    return Path("small.toml")


def summary(folder: Path | str = "runs/small") -> dict[str, Any]:
    return json.loads((Path(folder) / "summary.json").read_text())  # type: ignore[no-any-return]


def metrics(folder: Path | str = "runs/small") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def everything(folder: Path | str = "runs/small") -> Any:
    """What a run leaves, but for the times."""
    lines = [{n: v for n, v in record.items() if n != "seconds"} for record in metrics(folder)]
    return lines, {n: v for n, v in summary(folder).items() if n != "seconds"}


def check_refused(said: Any, *pieces: str) -> None:
    assert said.code == 2
    assert said.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", said.err), said.err
    assert "Traceback" not in said.err
    for piece in pieces:
        assert piece in said.err


# --- a run -------------------------------------------------------------------------------------------------------


def test_a_run(laconic: Any, file: Path) -> None:
    said = laconic("run", file)
    assert said.code == 0
    made = summary()
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in said.out.splitlines())
    assert rows == {
        "method": "fedavg, mlp (610 parameters)",
        "accuracy": f"{100 * made['global_accuracy']:.2f} %",
        "local accuracy": f"{100 * made['local_accuracy']:.2f} %",
        "up": f"29.8 kB, {8 * (40 + 4 * 610) / 610:.2f} bits per parameter",
        "down": f"29.8 kB, {8 * (40 + 4 * 610) / 610:.2f} bits per parameter",
        "time": f"{made['seconds']:.1f} s",
        "state": made["state_sha256"][:16],
        "files": "runs/small",
    }
    lines = said.err.splitlines()
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]
    assert all("accuracy" in line and "up" in line and "rounds/s" in line and "s left" in line for line in lines)
    assert "\x1b" not in said.err + said.out


def test_the_keys_of_the_files(laconic: Any, file: Path) -> None:
    laconic("run", file)
    evaluated = {"global_accuracy", "global_loss", "local_accuracy", "local_clients"}
    for record in metrics():
        assert {"schema", "round", "traffic", "clients", "seconds"} <= set(record)
        assert record["schema"] == 2
        assert set(record["traffic"]) == {"cohort", "replies", "rejected", "bytes_up", "bytes_down"}
        assert set(record["clients"]) == {"train_loss"}
        assert (evaluated <= set(record.get("evaluation", ()))) == (record["round"] % 2 == 0)
    assert [record["round"] for record in metrics()] == [1, 2, 3, 4]
    made = summary()
    assert {
        *("method", "model", "parameters", "rounds", "clients", "cohort", "seed", "global_accuracy", "local_accuracy"),
        *("bytes_up", "bytes_down", "bits_per_parameter_up", "bits_per_parameter_down", "paper_bytes", "seconds"),
        *("state_sha256", "versions"),
    } <= set(made)
    assert made["bytes_up"] == sum(record["traffic"]["bytes_up"] for record in metrics()) == 12 * (40 + 4 * 610)
    assert made["bits_per_parameter_up"] == 8 * made["bytes_up"] / (12 * 610)
    assert (made["rounds"], made["clients"], made["cohort"], made["seed"]) == (4, 6, 3, 1)
    assert re.fullmatch(r"[0-9a-f]{64}", made["state_sha256"])


def test_the_written_configuration_is_complete_and_runs_again(laconic: Any, file: Path) -> None:
    words = ["--set", "data.partition={kind='dirichlet',alpha=0.5}", "--set", "method.name=fedopt"]
    laconic("run", file, *words)
    written = tomllib.loads(Path("runs/small/config.toml").read_text())
    assert written["method"]["server"] == {"name": "adam", "lr": 0.01, "options": {}}
    assert written["method"]["momentum"] == 0.0
    assert written["run"]["min_replies"] == 1
    said = laconic("run", "runs/small/config.toml", "--out", "again", "--quiet")
    assert said.code == 0
    assert everything("again/small") == everything()
    assert Path("again/small/config.toml").read_text() == Path("runs/small/config.toml").read_text()


def test_workers_do_not_matter(laconic: Any, file: Path) -> None:
    made = []
    for workers in (0, 1, 2, 3, "auto"):
        assert laconic("run", file, "--quiet", "--out", f"w{workers}", "--workers", workers).code == 0
        made.append(everything(f"w{workers}/small"))
    assert all(each == made[0] for each in made[1:])


def test_quiet_says_nothing(laconic: Any, file: Path) -> None:
    assert laconic("run", file, "--quiet") == (0, "", "")


def test_overrides(laconic: Any, file: Path) -> None:
    laconic("run", file, "--quiet", "--set", "run.rounds=1", "--set", "method.lr=0.3", "--set", "run.name=x")
    written = tomllib.loads(Path("runs/x/config.toml").read_text())
    assert (written["run"]["rounds"], written["method"]["lr"]) == (1, 0.3)


def test_first_weights_from_a_file(laconic: Any, file: Path) -> None:
    """A run can begin where another ended; with a tiny step it stays there."""
    laconic("run", file, "--quiet")
    weights = "runs/small/model.safetensors"
    words = ["--set", f"model.init={weights}", "--set", "method.lr=1e-12", "--set", "run.name=second"]
    assert laconic("run", file, "--quiet", *words).code == 0
    assert summary("runs/second")["global_accuracy"] == summary()["global_accuracy"]
    first, second = (safetensors.torch.load_file(f"runs/{name}/model.safetensors") for name in ("small", "second"))
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    assert tomllib.loads(Path("runs/second/config.toml").read_text())["model"]["init"] == weights


OWN = """
import numpy as np
from torch import nn
from laconic import Federation

class Net(nn.Linear):
    def __init__(self, outputs=2):
        super().__init__(3, outputs)

def points(clients=4):
    x = np.random.default_rng(0).standard_normal((clients * 20, 3)).astype("float32")
    return Federation.from_arrays((x, (x.sum(1) > 0).astype("int64")), clients=clients, name="points")

def loss(output, target):
    return nn.functional.multi_margin_loss(output, target)

def half(output, target):
    return (output.argmax(1) == target).float() / 2
"""


def test_a_users_own_code_from_the_current_folder(laconic: Any, file: Path) -> None:
    Path("own_code_for_cli.py").write_text(OWN)
    Path("own.toml").write_text(
        """
        [run]
        name = "own"
        rounds = 2
        cohort = 3
        eval_every = 1
        workers = 2
        [data]
        source = "own_code_for_cli:points"
        clients = 5
        [model]
        name = "own_code_for_cli:Net"
        outputs = 2
        loss = "own_code_for_cli:loss"
        metrics = { half = "own_code_for_cli:half" }
        """
    )
    said = laconic("run", "own.toml")
    assert said.code == 0, said.err
    made = summary("runs/own")
    assert (made["model"], made["data"], made["clients"]) == ("own_code_for_cli:Net", "own_code_for_cli:points", 5)
    assert 0.25 < made["global_half"] <= 0.5
    assert made["global_accuracy"] is None
    assert "accuracy        -" in said.out
    check_refused(laconic("run", "runs/own/config.toml", "--out", "again", "--quiet"), "is code", "--allow-code")
    assert laconic("run", "runs/own/config.toml", "--allow-code", "--out", "again", "--quiet").code == 0
    assert summary("again/own")["state_sha256"] == made["state_sha256"]


# --- resuming ----------------------------------------------------------------------------------------------------


def test_a_run_is_not_started_twice_by_accident(laconic: Any, file: Path) -> None:
    laconic("run", file, "--quiet")
    first = summary()
    check_refused(laconic("run", file, "--quiet"), "runs/small already holds a run", "--resume", "--overwrite")
    said = laconic("run", file, "--resume")
    assert said.code == 0
    assert said.err == "resuming after round 4 of 4\n"
    assert summary() == first
    assert laconic("run", file, "--quiet", "--overwrite").code == 0
    check_refused(laconic("run", file, "--resume", "--overwrite"), "choose one")


def test_a_changed_configuration_is_refused_by_name(laconic: Any, file: Path) -> None:
    laconic("run", file, "--quiet")
    for override, was in (("method.lr=0.3", "method.lr was 0.2 and is 0.3 now"), ("run.seed=2", "data.seed was 1")):
        check_refused(laconic("run", file, "--resume", "--set", override), f"cannot resume runs/small: {was}")
    check_refused(laconic("run", file, "--resume", "--set", "link.up=float16"), "link.up was 'float32'")
    assert laconic("run", file, "--resume", "--quiet", "--workers", "1").code == 0


def test_an_unreadable_checkpoint(laconic: Any, file: Path) -> None:
    laconic("run", file, "--quiet")
    for path in Path("runs/small/checkpoints").glob("*.safetensors"):
        path.write_bytes(b"")
    check_refused(laconic("run", file, "--resume", "--quiet"), "none of the 3 checkpoints in runs/small/checkpoints")


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(laconic: Any, file: Path, caplog: Any) -> None:
    laconic("run", file, "--quiet")
    first = everything()
    Path("runs/small/checkpoints/round-000004.json").write_bytes(b"")
    said = laconic("run", file, "--resume")
    assert said.code == 0
    assert "resuming after round 2 of 4" in said.err
    assert [record.getMessage() for record in caplog.records if record.name == "laconic"] == [
        "checkpoint runs/small/checkpoints/round-000004.json is damaged "
        "(Expecting value: line 1 column 1 (char 0)); trying the one before"
    ]
    assert everything() == first


def test_a_second_process_is_refused(laconic: Any, file: Path, fork: Any) -> None:
    def hold() -> None:
        directory = RunDirectory(Path("runs"), "small")
        directory.open({}, resume=False)
        Path("held").touch()
        time.sleep(60)

    child = fork(hold)
    until(Path("held").exists)
    check_refused(laconic("run", file, "--quiet"), "runs/small is in use by another process")
    child.kill()
    child.wait()
    check_refused(laconic("run", file, "--quiet"), "runs/small already holds a run")


SENSORS = """
from pathlib import Path

import torch.nn.functional as F


def loss(output, target):
    if output.requires_grad and Path("broken").exists():
        raise ValueError("the sensor is unplugged")
    return F.cross_entropy(output, target)
"""


@pytest.fixture
def unplugged(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small run with a loss of the user's own, which fails at every client while there is a file `broken`."""
    Path("sensors.py").write_text(SENSORS)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "sensors", raising=False)
    file.write_text(SMALL.replace("hidden = [8]", 'hidden = [8]\nloss = "sensors:loss"'))
    Path("broken").touch()
    return file


def test_a_run_whose_every_round_was_abandoned_is_one_sentence_and_keeps_its_files(
    laconic: Any, unplugged: Path
) -> None:
    words = ("run", unplugged, "--workers", "1", "--quiet")
    said = "every one of the 4 rounds was abandoned, so nothing was learnt; the last one because no reply was accepted"
    check_refused(laconic(*words), said, "client_error, ValueError: the sensor is unplugged")
    assert [record["abandoned"] for record in metrics()] == ["no reply was accepted"] * 4
    assert {"round-000000.json", "round-000004.json"} <= {
        path.name for path in Path("runs/small/checkpoints").iterdir()
    }
    assert not Path("runs/small/summary.json").exists()
    check_refused(laconic(*words), "runs/small already holds a run")
    check_refused(laconic(*words, "--resume"), said)
    Path("broken").unlink()
    assert laconic(*words, "--overwrite").code == 0
    assert summary()["abandoned"] == 0


def test_a_run_that_was_interrupted_among_abandoned_rounds_is_resumed(
    laconic: Any, unplugged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RunDirectory.append

    def press(self: RunDirectory, record: Any) -> int:
        if record.round == 3:
            raise KeyboardInterrupt
        return append(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append", press)
        assert laconic("run", unplugged, "--workers", "1", "--quiet").code == 130
    assert [bool(record.get("abandoned")) for record in metrics()] == [True, True]
    Path("broken").unlink()
    assert laconic("run", unplugged, "--workers", "1", "--quiet", "--resume").code == 0
    assert [bool(record.get("abandoned")) for record in metrics()] == [True, True, False, False]
    assert summary()["abandoned"] == 2


def test_without_workers_a_clients_exception_comes_through_with_its_place(laconic: Any, unplugged: Path) -> None:
    """For debugging: a traceback to the user's own line, and who, when and where."""
    with pytest.raises(ValueError, match="the sensor is unplugged") as caught:
        laconic("run", unplugged, "--quiet")
    assert re.fullmatch(r"\(client \d, round 1, in client_update\)", caught.value.__notes__[0])
    assert caught.traceback[-1].path.name == "sensors.py"


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGINT, 2), (signal.SIGTERM, 0)])
def test_ctrl_c_leaves_a_resumable_run(laconic: Any, file: Path, fork: Any, number: int, workers: int) -> None:
    """Exit code 130, no noise from workers, and a hint that works. The whole group gets Ctrl-C, as from a terminal."""
    Path("small.toml").write_text(SMALL.replace("rounds = 4", "rounds = 6").replace("checkpoint_every = 2", ""))
    words = ["run", "small.toml", "--set", "data.partition={kind = 'dirichlet'}", "--out", "my runs"]
    assert laconic(*words, "--out", "whole", "--quiet").code == 0

    def work() -> None:
        os.setpgrp()
        population = import_module("laconic.core.population")
        sample = population.sample_cohort

        def pressing(key: Any, **sizes: int) -> Any:
            written = Path("my runs/small/metrics.jsonl")
            if written.exists() and len(written.read_text().splitlines()) == 3:
                os.kill(-os.getpid() if number == signal.SIGINT else os.getpid(), number)
            return sample(key, **sizes)

        population.sample_cohort = pressing
        sys.argv = ["/usr/bin/laconic", *words, "--workers", str(workers), "--overwrite"]
        main()

    assert fork(work).wait() == 130
    said = (Path.cwd().parent / "child.log").read_text()
    hint = re.search(r"^interrupted; go on with: laconic (.*)$", said, re.MULTILINE)
    assert hint, said
    assert "Traceback" not in said
    assert len(metrics("my runs/small")) == 3
    again = shlex.split(hint[1])
    assert again == [*words, "--workers", str(workers), "--resume"]
    resumed = laconic(*again)
    assert resumed.code == 0
    assert resumed.err.startswith("resuming after round 3 of 6\n")
    assert everything("my runs/small") == everything("whole/small")


def test_ctrl_c_before_the_run_begins(laconic: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("laconic.config.experiment_from", press)
    said = laconic("run", file)
    assert said.code == 130
    assert "Traceback" not in said.err


def test_signal_handlers_are_put_back(laconic: Any, file: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    laconic("run", file, "--quiet", "--set", "run.rounds=1")
    assert signal.getsignal(signal.SIGTERM) is before


# --- bad input ---------------------------------------------------------------------------------------------------

BAD = {
    "unknown key": (["--set", "run.cohrt=3"], "unknown key 'cohrt'; did you mean 'cohort'?"),
    "unknown section": (["--set", "rn.seed=3"], "unknown section [rn]; did you mean 'run'?"),
    "wrong type": (["--set", "run.rounds=many"], "rounds: should be a valid integer, got 'many'."),
    "method": (["--set", "method.name=fedavgg"], "unknown method 'fedavgg'; did you mean 'fedavg'?"),
    "model": (["--set", "model.name=mpl"], "unknown model 'mpl'; did you mean 'mlp'?"),
    "dataset": (["--set", "data.source=digit"], "'digit'; did you mean 'digits'?"),
    "partition": (["--set", "data.partition=dirichlett"], "unknown partition 'dirichlett'; did you mean 'dirichlet'?"),
    "codec": (["--set", "link.down=float23"], "unknown codec 'float23'; did you mean 'float32'?"),
    "cohort": (["--set", "run.cohort=7"], "run.cohort is 7, but there are only 6 clients"),
    "impossible": (["--set", "data.clients=121"], "121 clients cannot share 120 training examples"),
    "no data": (["--set", "data.source=parquet", "--set", "data.path=/nowhere"], "nowhere"),
    "name": (["--set", "run.name=../x"], "run.name must be 1 to 100 letters"),
    "long name": (["--set", f"run.name={'x' * 300}"], "run.name must be 1 to 100 letters"),
    "absolute name": (["--set", "run.name=/tmp/x"], "run.name must be 1 to 100 letters"),
    "unicode name": (["--set", "run.name=ｘ"], "run.name must be 1 to 100 letters"),
    "nul in name": (["--set", 'run.name="a\\u0000b"'], "run.name must be 1 to 100 letters"),
    "out is a file": (["--out", "small.toml"], "cannot write small.toml/small: not a directory"),
    "out below a file": (["--out", "small.toml/deeper"], "cannot write small.toml/deeper/small: not a directory"),
    "workers": (["--workers", "some"], "got 'some'"),
    "set": (["--set", "rounds"], "--set takes section.key=value, got 'rounds'."),
    "device": (["--set", "run.device=nonsense"], "run.device 'nonsense' cannot be used here"),
    "own model": (["--set", "model.name=no_such:Net"], "model 'no_such:Net': cannot import 'no_such'"),
    "weights": (["--set", "model.init=no.safetensors"], "[model] init: cannot read no.safetensors"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(laconic: Any, file: Path, case: str) -> None:
    words, said = BAD[case]
    if case == "no data":
        Path("small.toml").write_text('[data]\nsource = "digits"\n')
    before = sorted(Path().rglob("*"))
    check_refused(laconic("run", file, *words), said)
    assert sorted(Path().rglob("*")) == before, "nothing was made"
    assert sorted(path.name for path in Path("..").iterdir()) == ["work"]


def test_files_that_cannot_be_read(laconic: Any, file: Path) -> None:
    check_refused(laconic("run", "none.toml"), "cannot read none.toml: no such file or directory.")
    check_refused(laconic("run", "."), "cannot read .: is a directory.")
    Path("bad.toml").write_text("[run\n")
    check_refused(laconic("run", "bad.toml"), "bad.toml is not valid TOML")
    Path("bad.safetensors").write_bytes(b"not weights")
    check_refused(laconic("run", file, "--set", "model.init=bad.safetensors"), "bad.safetensors is not a safetensors")


def test_a_missing_data_folder(laconic: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mnist.toml").write_text('[data]\nsource = "mnist"\n')
    monkeypatch.setenv("LACONIC_DATA", "/nowhere")
    check_refused(laconic("run", "mnist.toml"), "mnist", "/nowhere")


def test_a_full_disk(file: Path, fork: Any) -> None:
    """No file may grow beyond 4 kB: the first checkpoint fits, the model with its optimizer does not."""
    words = ["run", "small.toml", "--set", "method.name=fedopt", "--quiet"]

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        sys.argv = ["laconic", *words]
        main()

    assert fork(work).wait() == 2
    said = (Path.cwd().parent / "child.log").read_text()
    assert re.fullmatch(
        r"error: cannot write runs/small/checkpoints/round-000002\.safetensors: file too large; free [^\n]*\n", said
    ), said
    assert sorted(path.name for path in Path("runs/small/checkpoints").iterdir()) == [
        *("round-000000.json", "round-000000.safetensors")
    ]
    sys.argv = ["laconic", *words, "--resume"]
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert summary()["rounds"] == 4


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        (["run"], "Missing argument"),
        (["run", "small.toml", "--colour"], "No such option"),
        (["list", "things"], "is not one of"),
        (["fly"], "No such command"),
    ],
)
def test_misuse_of_the_command_line(laconic: Any, file: Path, words: list[str], piece: str) -> None:
    said = laconic(*words)
    assert said.code == 2
    assert piece in said.err
    assert "Traceback" not in said.err


# --- catalogues and the rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "some"),
    [
        ("methods", ["fedavg", "fedprox", "fedopt", "fedmedian", "fedensemble"]),
        ("models", ["mlp", "lenet5_fs", "lenet5", "lg_cnn", "lg_mlp", "conv4", "conv6", "conv10", "resnet20_gn"]),
        ("datasets", ["digits", "synthetic", "mnist", "femnist", "cifar10", "cifar100", "svhn", "gtsrb", "adult"]),
        (
            "partitions",
            ["iid", "dirichlet", "dirichlet_per_class", "pachinko", "label_shards", "cmax", "groups", "even"],
        ),
        ("codecs", ["float32", "float16", "bfloat16"]),
    ],
)
def test_catalogues(laconic: Any, what: str, some: list[str]) -> None:
    said = laconic("list", what)
    assert (said.code, said.err) == (0, "")
    head, *rows = said.out.splitlines()
    assert re.split(r"\s{2,}", head.strip()) == [what, "what it is", "where it lives"]
    entries = [re.split(r"\s{2,}", row.strip()) for row in rows]
    assert all(len(entry) == 3 and re.fullmatch(r"laconic[\w.]*:\w+", entry[2]) for entry in entries), entries
    assert set(some) <= {entry[0] for entry in entries}


def test_brackets_are_text(laconic: Any, file: Path) -> None:
    """Rich would take "[bold]" for markup and stumble over "[/x]"."""
    said = laconic("run", file, "--out", "a[bold][", "--set", "run.rounds=1")
    assert said.code == 0
    assert "a[bold][/small" in said.out


def test_version_and_help(laconic: Any) -> None:
    assert laconic("--version") == (0, f"laconic {version('laconic')}\n", "")
    said = laconic("--help")
    assert said.code == 0
    assert "federated learning in few bits" in said.out
    said = laconic("run", "--help")
    for option in ("--set", "--out", "--resume", "--workers", "--quiet"):
        assert option in said.out


def test_as_a_process(file: Path) -> None:
    """Once for real: the installed command, its two streams and its exit code."""
    command = Path(sys.executable).with_name("laconic")
    entry = [command] if command.exists() else [sys.executable, "-c", "from laconic.cli import main; main()"]
    bad = subprocess.run([*entry, "run", "small.toml", "--set", "run.cohort=7"], capture_output=True, text=True)
    check_refused(Refused(bad.returncode, bad.stdout, bad.stderr), "run.cohort is 7")


class Refused(NamedTuple):
    code: int
    out: str
    err: str
