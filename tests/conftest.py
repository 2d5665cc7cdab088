"""What tests of several packages share: a child process that can be killed, and the command line without a process."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest


class Child:
    """A function in a forked child: starts at once (torch is imported already), says nothing, can be killed."""

    def __init__(self, work: Callable[[], object], log: Path) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                # Descriptors too: forked workers and libraries write there.
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                sys.stdout = sys.stderr = os.fdopen(descriptor, "a", buffering=1)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                import torch

                torch.set_num_threads(1)  # threads do not survive a fork
                work()
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def wait(self, seconds: float = 60.0) -> int | None:
        """The exit code (negative: the signal that ended it), or None if it still runs after so many seconds."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.001)
        return self.code

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[[Callable[[], object]], Child]]:
    """Run a function in a child process; `tmp_path / "child.log"` holds what the children said."""
    children: list[Child] = []

    def start(work: Callable[[], object]) -> Child:
        children.append(Child(work, tmp_path / "child.log"))
        return children[-1]

    yield start
    for child in children:
        if child.wait(0) is None:
            child.kill()
            child.wait()


class Said(NamedTuple):
    """What the command line gave."""

    code: int
    out: str
    err: str


@pytest.fixture
def laconic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`laconic(*words)`: the command line, from its entry point on, in this process."""
    from laconic.cli import main

    monkeypatch.delenv("LACONIC_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["laconic", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        return Said(stop.value.code, *capsys.readouterr())

    return run
