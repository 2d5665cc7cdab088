"""Files that others may have written: they are bounded before anything is built, and cost no more than themselves."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import copytree
from threading import Thread
from typing import Any

import pytest
import safetensors.torch
import torch

import laconic as lc
from laconic.cli import app
from laconic.codecs import parse
from laconic.core import Artifact, ClientInfo, ConfigError, DataError, Key, PayloadError, read_state, spec_of
from laconic.engine import Agreement, Checkpoints, Link, open_reply
from laconic.engine.checkpoint import _signed
from laconic.flower.states import FolderEntries
from laconic.model_file import read_model, write_model
from laconic.models import models
from laconic.report import WatchServer, find_runs, read_run
from laconic.report.html import write_report
from laconic.report.watch import _Handler
from laconic.testing import small_task

# --- model files -----------------------------------------------------------------------------------------------------


def bomb(hidden: int) -> bytes:
    """A well-formed file of a few bytes for a model of zeros."""
    settings = {"hidden": [hidden]}
    module = models.build("mlp", settings, given=((64,), 10))
    tree = {name: torch.zeros_like(leaf) for name, leaf in read_state(module).items()}
    architecture = {"name": "mlp", "settings": settings, "shape": [64], "outputs": 10}
    return write_model(Artifact("weights", tree), architecture, spec_of(tree))


def test_a_small_file_cannot_ask_for_a_large_model() -> None:
    blob = bomb(200_000)
    assert len(blob) < 200
    tracemalloc.start()
    with pytest.raises(PayloadError, match=r"a model of 15,000,010 parameters, but .* is the most for \d+ bytes"):
        read_model(blob)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert read_model(blob, max_parameters=20_000_000).parameters == 15_000_010  # if somebody wants it


def test_a_small_model_of_zeros_is_read() -> None:
    assert read_model(bomb(2000)).parameters == 150_010


# --- frames ----------------------------------------------------------------------------------------------------------


def test_a_large_frame_is_refused_before_it_is_copied() -> None:
    agreement = Agreement(lc.fedavg().bind(small_task()), Link(parse("float32"), parse("float32")), Key.from_seed(0))
    frame = bytes(64 << 20)
    tracemalloc.start()
    with pytest.raises(PayloadError, match=r"a frame of 67,108,864 bytes, but .* is the most for this message"):
        open_reply(agreement, frame, agreement.first_held(), ClientInfo(0, 1, 0))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


# --- runs' folders ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    for name in ("good", "bad"):
        lc.fit(data=lc.data.digits(clients=3), rounds=2, cohort=3, workers=0, eval_every=1, out=out, name=name)
    return out


DEEP = "[" * 100_000
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no JSON": lambda run: (run / "summary.json").write_text("{"),
    "deep": lambda run: (run / "metrics.jsonl").write_text(DEEP + "\n"),
    "infinite": lambda run: (run / "metrics.jsonl").write_text('{"schema":2,"round":1e999,"traffic":{}}\n'),
    "an infinite byte": lambda run: (run / "metrics.jsonl").write_text(
        '{"schema":2,"round":1,"traffic":{"bytes_up":1e999,"bytes_down":1}}\n'
    ),
    "not a number": lambda run: (run / "summary.json").write_text('{"rounds": NaN}'),
    "another type": lambda run: (run / "summary.json").write_text('{"versions": 3}'),
    "no TOML": lambda run: (run / "config.toml").write_text("["),
    "bytes": lambda run: (run / "config.toml").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_damaged_run_ends_neither_report_nor_page(
    runs: Path, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {path: path.read_bytes() for path in (runs / "bad").iterdir() if path.is_file()}
    try:
        DAMAGE[damage](runs / "bad")
        page = write_report([runs], tmp_path / "report.html").read_text()
        assert "good" in page
        assert "left out" in caplog.text
        with WatchServer(runs, port=0) as server:
            shown = json.loads(server.answers["/runs.json"]().body)
        assert [run["name"] for run in shown["runs"]] == ["good"]
        assert [run["name"] for run in shown["unreadable"]] == ["bad"]
        with pytest.raises(DataError):
            write_report([runs / "bad"], tmp_path / "alone.html")
    finally:
        for path, data in kept.items():
            path.write_bytes(data)
    assert len(find_runs(runs)) == 2
    assert read_run(runs / "bad").finished


@pytest.mark.parametrize("text", [DEEP, '{"round": NaN}', '{"round": 1e999}', '{"round": 2, "sha256": 1}', "[]", ""])
def test_a_checkpoint_that_is_none_is_passed_over(text: str, tmp_path: Path, runs: Path) -> None:
    run = copytree(runs / "good", tmp_path / "good")
    checkpoints = Checkpoints(run / "checkpoints")
    for manifest in checkpoints.folder.glob("*.json"):
        manifest.write_text(text)
    with pytest.raises(lc.RunError, match=r"none of the \d checkpoints in .* can be read"):
        checkpoints.load()


@pytest.mark.parametrize("bad", ["tensors", "note"])
def test_a_checkpoint_whose_values_are_no_numbers_is_passed_over(bad: str, tmp_path: Path, runs: Path) -> None:
    """Signed and all: whoever can write there can sign."""
    run = copytree(runs / "good", tmp_path / "good")
    folder = run / "checkpoints"
    for manifest in folder.glob("*.json"):
        spoil(manifest, bad)
    with pytest.raises(lc.RunError, match="can be read"):
        Checkpoints(folder).load()


def spoil(manifest: Path, bad: str) -> None:
    body = json.loads(manifest.read_bytes())
    del body["sha256"]
    if bad == "tensors":
        tensors = manifest.with_suffix(".safetensors")
        tree = safetensors.torch.load(tensors.read_bytes())
        tensors.write_bytes(
            safetensors.torch.save({name: torch.full_like(leaf, torch.nan) for name, leaf in tree.items()})
        )
        body["tensors_sha256"] = hashlib.sha256(tensors.read_bytes()).hexdigest()
    else:
        body["notes"]["metrics_bytes"] = float("nan")
    manifest.write_bytes(_signed(body))


# --- what lies on a node ---------------------------------------------------------------------------------------------


def test_the_states_of_a_client_are_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        entries = FolderEntries(tmp_path / "states" / "run" / "3")
        entries["personal.1"] = b"state"
    finally:
        os.umask(before)
    assert stat.S_IMODE(entries.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((entries.folder / "personal.1").stat().st_mode) == 0o600


# --- the page's server, the command line -----------------------------------------------------------------------------


def test_a_request_that_drips_is_hung_up(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Handler, "timeout", 0.5)
    with WatchServer(runs, port=0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        began, sent = time.monotonic(), 0
        connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=5)
        try:
            with suppress(OSError):  # it is shut
                for sign in b"GET / HTTP/1.1\r\nX: " + b"x" * 200:
                    connection.sendall(bytes([sign]))
                    sent += 1
                    time.sleep(0.05)
        finally:
            connection.close()
            server.shutdown()
            thread.join()
    assert sent < 100
    assert time.monotonic() - began < 4


def test_ctrl_c_while_torch_is_imported_is_130(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nrounds = 1\n")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a background job ignores it
        "sys.argv = ['laconic', 'run', 'run.toml']; from laconic.cli import main; print(flush=True); main()"
    )
    for delay in (0.05, 0.2, 0.4):
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert b"Traceback" not in said
        assert said.startswith(b"interrupted")


# --- a configuration is code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '[data]\nsource = "evil:attack"\n',
        '[model]\nname = "evil:attack"\n',
        '[model]\nloss = "evil:attack"\n',
        '[method]\nname = "evil:attack"\n',
        '[link]\nup = "evil.codecs:attack"\n',
    ],
)
def test_a_file_of_another_folder_names_no_code(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    file = there / "run.toml"
    file.write_text(text)
    (here / "evil.py").write_text("raise SystemExit('owned')\n")
    monkeypatch.chdir(here)
    for command in (["run", str(file)], ["compare", str(file)], ["deploy", "init", "app", "--config", str(file)]):
        said = CliRunner().invoke(app, command).exception
        assert isinstance(said, ConfigError)
        assert "is code, and" in str(said)
        assert "--allow-code" in str(said)
    said = CliRunner().invoke(app, ["run", str(file), "--allow-code"]).exception
    assert "owned" in str(said) or "evil" in str(said)
    monkeypatch.chdir(there)  # read and run where it lies
    assert "is code" not in str(CliRunner().invoke(app, ["run", "run.toml"]).exception)
