"""A deployment on this machine: real processes, real sockets, started and stopped by a test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from laconic.engine import Record
from laconic.flower.certs import make_certs
from laconic.flower.folder import make_folder

PATIENCE = 300.0  # seconds for anything that starts: boxes that run tests are busy
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, found: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


class Stack:
    """One SuperLink and its SuperNodes, from the scripts that `laconic deploy init` writes."""

    def __init__(self, folder: Path, table: Mapping[str, Any], *, insecure: bool = False) -> None:
        self.folder, self.app = folder, folder / "app"
        self.clients = int(table["data"]["clients"])
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.out = folder / "runs"
        (folder / "first.toml").write_text(tomli_w.dumps(dict(table)))
        make_folder(self.app, folder / "first.toml", address=self.address, insecure=insecure)
        self.insecure = insecure
        if not insecure:
            make_certs(self.app / "certs", hosts=["127.0.0.1", "localhost"], nodes=self.clients)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("FLWR", "LACONIC"))},
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def up(self) -> None:
        """SuperLink, registration, all nodes."""
        self.start("superlink", str(self.app / "superlink.sh"))
        wait_for("the SuperLink's port", self.listens)
        if not self.insecure:
            self.run(str(self.app / "register.sh"))
        for client in range(self.clients):
            self.node(client)
        for client in range(self.clients):
            wait_for(f"node {client}", lambda name=f"node-{client}": "SuperNode ID" in self.log(name))

    def node(self, client: int, **environment: str) -> subprocess.Popen[bytes]:
        return self.start(
            f"node-{client}",
            str(self.app / "supernode.sh"),
            str(client),
            LACONIC_NODE_PORT=str(free_port()),
            **environment,
        )

    def come_back(self, client: int) -> None:
        """Start a node that was killed: it is let in when the SuperLink has given up its heartbeat, within a minute."""
        name = f"node-{client}"
        before = self.log(name).count("SuperNode ID")

        def there() -> bool:
            if name not in self.processes or self.processes[name].poll() is not None:
                self.node(client)
                time.sleep(5)
            return self.log(name).count("SuperNode ID") > before

        wait_for(f"the return of {name}", there)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def run(self, *command: str, seconds: float = PATIENCE, **environment: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
        said = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == 0, said
        return said

    # --- runs --------------------------------------------------------------------------------------------------------

    def submit(self, table: Mapping[str, Any]) -> None:
        """Start a run, or go on with it, and come back at once."""
        (self.app / "run.toml").write_text(tomli_w.dumps({k: v for k, v in table.items() if v}))
        self.start(f"submit-{len(self.processes)}", str(self.app / "submit.sh"), "--run-config", f"out='{self.out}'")

    def finished(self, name: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """The summary of a run, when it is there."""
        path = self.out / name / "summary.json"
        wait_for(f"the end of {name}", path.exists, seconds)
        return dict(json.loads(path.read_text()))

    def records(self, name: str) -> list[Record]:
        path = self.out / name / "metrics.jsonl"
        return [Record.read(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    # --- the end -----------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End a process and whatever it started."""
        process = self.processes.pop(name)
        for number in (signal.SIGCONT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        process.wait(timeout=30)

    def serverapps(self) -> list[int]:
        """The ServerApps that the SuperLink has started: they are in its session."""
        link = self.processes["superlink"].pid
        return [pid for pid in members(link) if "flwr-serverapp" in command_of(pid)]

    def down(self) -> list[int]:
        """Stop everything; gives what is still alive: nothing, one hopes."""
        sessions = [process.pid for process in self.processes.values()]
        for process in self.processes.values():
            process.terminate()
        ends = time.monotonic() + 10
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, ends - time.monotonic()))
        for name in list(self.processes):
            self.kill(name)
        left = [pid for session in sessions for pid in members(session)]
        return wait_gone(left)


def wait_gone(pids: list[int], seconds: float = 20.0) -> list[int]:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and any(map(alive, pids)):
        time.sleep(0.2)
    return [pid for pid in pids if alive(pid)]


def members(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
