"""The command line on a Ray of its own; mistakes cost a sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.conftest import Said
from tests.flower.conftest import table_for

from laconic.cluster import Cluster
from laconic.config import experiment_from
from laconic.core import ConfigError

SAME = ("state_sha256", "bytes_up", "bytes_down", "global_accuracy", "local_accuracy", "rejected")


def written(table: dict[str, Any], folder: Path) -> Path:
    file = folder / f"{table['run']['name']}.toml"
    file.write_text(tomli_w.dumps({key: value for key, value in table.items() if value}))
    return file


def command(*words: object) -> list[str]:
    """`laconic` in a process of its own, as users start it."""
    return [sys.executable, "-c", "from laconic.cli import main; main()", *map(str, words)]


def summary(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "summary.json").read_text())
    return {key: found[key] for key in SAME}


def left_over(mark: Path) -> list[str]:
    """Processes that were started from a folder and are still there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == mark:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_two_methods_on_a_ray_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    for name in ("eden", "lg_fedavg"):
        table = table_for(name, rounds=2)
        done = subprocess.run(
            command("run", written(table, tmp_path), "--engine", "ray", "--out", tmp_path, "--quiet"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        embedded = experiment_from(table).run().summary
        assert summary(tmp_path / name) == {key: embedded[key] for key in SAME}
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_a_comparison_on_a_ray_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    files = [written(table_for(name, rounds=2), tmp_path) for name in ("fedavg", "fedpm")]
    words = ["compare", *files, "--seeds", 2, "--quiet"]
    for more in (["--out", tmp_path / "here"], ["--out", tmp_path / "there", "--engine", "ray"]):
        done = subprocess.run(command(*words, *more), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    for run in ("fedavg-s0", "fedavg-s1", "fedpm-s0", "fedpm-s1"):
        assert summary(tmp_path / "there" / run) == summary(tmp_path / "here" / run)
    assert not list((tmp_path / "there").glob(".seen-*"))
    assert left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "compare"])
def test_an_interrupted_run_keeps_its_last_whole_round(tmp_path: Path, what: str) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    rounds = 2000
    table = table_for("eden", rounds=rounds, checkpoint_every=rounds)
    folder = tmp_path / ("eden" if what == "run" else "eden-s0")
    words = [what, written(table, tmp_path), "--engine", "ray", "--out", tmp_path]
    words += ["--seeds", 1] if what == "compare" else []
    process = subprocess.Popen(command(*words), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_text().count("\n") < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "interrupted; go on with" in said
    made = (folder / "metrics.jsonl").read_text().count("\n")
    assert 5 <= made < rounds
    newest = max(int(re.sub(r"\D", "", path.name)) for path in (folder / "checkpoints").glob("*.json"))
    assert newest == made  # the last whole round was kept
    deadline = time.monotonic() + 20
    while left_over(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left_over(tmp_path) == []


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return written(table_for("fedavg"), tmp_path)


@pytest.mark.parametrize("words", [["run"], ["compare"]])
def test_an_address_that_does_not_answer(file: Path, laconic: Callable[..., Said], words: list[str]) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said = laconic(*words, file, "--quiet", "--engine", "ray", "--address", f"127.0.0.1:{port}")
    assert said.code == 2
    assert said.err == (
        f"error: no Ray answers at 127.0.0.1:{port} (connection refused); is it running, and is this its port?\n"
    )


@pytest.mark.slow
def test_an_address_where_somebody_else_answers(file: Path, laconic: Callable[..., Said]) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        child = os.fork()
        if not child:
            line, _ = other.accept()
            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            os._exit(0)
        said = laconic("run", file, "--engine", "ray", "--address", f"127.0.0.1:{port}")
        os.waitpid(child, 0)
    assert (said.code, said.err) == (2, f"error: who answers at 127.0.0.1:{port} is no Ray; is this its port?\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--address", "auto"], "--address is for --engine ray."),
        (["--cpus-per-client", "2"], "--cpus-per-client is for --engine ray."),
        (["--engine", "flower-sim", "--gpus-per-client", "1"], "--gpus-per-client is for --engine ray."),
        (["--engine", "ray", "--cpus-per-client", "0"], "--cpus-per-client must be more than 0, got 0."),
        (["--engine", "ray", "--gpus-per-client", "-1"], "--gpus-per-client must not be negative, got -1."),
        (["--engine", "ray", "--address", "here"], "--address must be auto or HOST:PORT of a Ray, got 'here'."),
        (["--engine", "ray", "--workers", "2"], "--workers is for worker processes here; on a cluster, give"),
    ],
)
def test_options_that_do_not_go_together(
    file: Path, laconic: Callable[..., Said], words: list[str], expected: str
) -> None:
    said = laconic("run", file, *words)
    assert said.code == 2
    assert said.err.startswith(f"error: {expected}")
    assert said.err.count("\n") == 1


def test_processes_are_for_this_machine(file: Path, laconic: Callable[..., Said]) -> None:
    said = laconic("compare", file, "--processes", 1, "--engine", "ray")
    assert said.code == 2
    assert "processes are for this machine" in said.err


def test_a_recipe_without_runs_takes_no_cluster(tmp_path: Path, laconic: Callable[..., Said]) -> None:
    said = laconic("reproduce", "lg-theory", "--out", tmp_path, "--engine", "ray")
    assert said.code == 2
    assert "lg-theory has no runs that a cluster could take" in said.err


def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    install = r"this needs Ray .*; install it with: pip install 'laconic\[ray\]'"
    with pytest.raises(ConfigError, match=install), Cluster().connected():
        pass
