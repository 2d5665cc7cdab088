"""Child processes and the pipes to them.

Forked ones share what the parent has, and need no pickling to start. Spawned ones inherit nothing: what an accelerator
needs, whose state does not survive a fork.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch


class Child(NamedTuple):
    """A child process and our end of its pipe."""

    process: Any
    pipe: Connection


def can_fork() -> bool:
    """Whether this system can fork."""
    return "fork" in multiprocessing.get_all_start_methods()


def fork(
    work: Callable[..., None], *args: object, siblings: Iterable[Connection] = (), may_fork: bool = False
) -> Child:
    """Run `work(pipe, inherited, *args)` in a child, which calls `settle(inherited)` first.

    `siblings` are our ends of other children's pipes. `may_fork` lets the child have children of its own.
    """
    return _start("fork", work, args, siblings, daemon=not may_fork)


def spawn(work: Callable[..., None], *args: object) -> Child:
    """The same in a child that inherits nothing; `work` and its arguments are pickled."""
    return _start("spawn", work, args, (), daemon=True)


def _start(
    method: str, work: Callable[..., None], args: Iterable[object], siblings: Iterable[Connection], *, daemon: bool
) -> Child:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    inherited = [ours, *siblings] if method == "fork" else []
    process = context.Process(target=work, args=(theirs, inherited, *args), daemon=daemon)
    # Until the child ignores Ctrl-C, it must not get it: the parent answers for all.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    theirs.close()
    return Child(process, ours)


def settle(inherited: Iterable[Connection], *, alone_with: Connection | None = None) -> None:
    """A child's first steps: one torch thread, deaf to Ctrl-C, and no copies of pipe ends that are not its own.

    `alone_with` its pipe, it keeps no other socket of its parent's: where these lead to somebody else, nobody there
    would notice the parent dying.
    """
    # The parent answers Ctrl-C for all. Our copies of its pipe ends must go, or nobody would notice it dying.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for connection in inherited:
        connection.close()
    if alone_with is not None:
        _close_sockets(but=alone_with.fileno())
    # What the parent left lying about is not ours to clean up: a loop that it had begun would, closed here, turn the
    # threads on again, and threads do not survive a fork.
    gc.freeze()
    torch.set_num_threads(1)


def _close_sockets(*, but: int) -> None:
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        with suppress(OSError):  # the listing's own is closed already
            if number > 2 and number != but and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)


def end(children: Iterable[Child], *, patience: float) -> list[int | None]:
    """Hang up, wait a little, then insist; gives the exit codes, and leaves neither zombies nor descriptors."""
    children = list(children)
    for child in children:
        child.pipe.close()
    deadline = time.monotonic() + patience
    codes: list[int | None] = []
    try:
        for process, _ in children:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
    finally:  # Ctrl-C while we wait: no more patience
        for process, _ in children:
            if process.is_alive():
                process.kill()
                process.join()
            codes.append(process.exitcode)
            process.close()
    return codes


def interrupt(*_: object) -> NoReturn:
    """What a signal does that is to end a run as Ctrl-C does."""
    raise KeyboardInterrupt
