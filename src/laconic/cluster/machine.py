"""A machine of the cluster: an actor that reads the data once and forks workers that share them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

import laconic.engine
from laconic.config import parts_of
from laconic.engine import Agreement, Clients, versions
from laconic.engine.processes import can_fork
from laconic.engine.workers import InProcess, Job, Pool, Processes, Station

Work = Mapping[str, Mapping[str, Any]] | tuple[Agreement, Clients]
"""What an actor computes for: a run as plain sections, or (for runs that were made of objects) its parts."""


class Identity(NamedTuple):
    """What has to be the same on all machines for a run to give the same bits on each."""

    versions: dict[str, str]
    fingerprint: str
    data: str
    processor: str

    @classmethod
    def of(cls, agreement: Agreement, clients: Clients) -> Identity:
        """That of a run, as it is on this machine."""
        processor = str(torch.backends.cpu.get_cpu_capability())
        return cls(made_with(), agreement.fingerprint.hex(), _glance(clients), processor)

    def unlike(self, other: Identity) -> str:
        """The first thing in which `other`, of another machine, is not like this one; empty if there is none."""
        if unlike := unlike_versions(self.versions, other.versions):
            return unlike
        if other.fingerprint != self.fingerprint:
            return "makes another model, method or link of this run; is its own code the same there?"
        if other.data != self.data:
            return "has other data than this one; give all machines the same"
        return ""


def made_with() -> dict[str, str]:
    """What results are made with on this machine. Of Pythons, Ray sees that they are the same."""
    made = {name: number for name, number in versions().items() if name != "python"}
    return {**made, "laconic": f"{made['laconic']} ({_code()})"}


def unlike_versions(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The first version that another machine does not share; empty if there is none."""
    for name, number in here.items():
        if (other := there.get(name, "none")) != number:
            return f"has {name} {other}, but this one has {number}; install the same on all"
    return ""


@cache
def _code() -> str:
    """A hash of laconic's own source: two checkouts of one version may differ."""
    folder = Path(laconic.engine.__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def _glance(clients: Clients) -> str:
    """A hash of how many rows there are, and of the rows of the first and the last client."""
    last = clients.num_clients - 1
    digest = hashlib.sha256(f"{clients.num_clients} {len(clients.test)} {len(clients.validation)}".encode())
    for part in (part for client in (0, last) for data in [clients.client(client)] for part in (data.train, data.test)):
        digest.update(f" {len(part)} {tuple(part.x.shape)} {tuple(part.y.shape)}".encode())
        digest.update(part.index.contiguous().numpy().tobytes())
        for rows in part.tensors():
            digest.update(rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Again:
    """A job that is begun again where its worker dies: nothing is lost by that, not even a local update."""

    job: Job
    once = False

    @property
    def small(self) -> bool:
        return self.job.small

    def run(self, station: Station) -> Any:
        return self.job.run(station)


class Machine:
    """The actor. Its calls run in as many threads as it has workers, each of which has one call at a time."""

    def __init__(self) -> None:
        self._slots: list[Pool] = []
        self._free: SimpleQueue[Pool] = SimpleQueue()

    def open(self, work: Work, folder: str, slots: int) -> Identity:
        """Read the data and fork the workers; gives what the caller compares with its own."""
        torch.set_num_threads(1)  # before anything is computed: threads do not survive a fork
        with suppress(OSError):  # relative paths of a run are from where it was started
            os.chdir(folder)
        agreement, clients = parts_of(work) if isinstance(work, Mapping) else work
        forks = can_fork() and agreement.method.task.device == "cpu"
        for _ in range(slots if forks else 1):
            pool: Pool = Processes(agreement, clients, 1, alone=True) if forks else InProcess(agreement, clients)
            self._slots.append(pool)
            self._free.put(pool)
        return Identity.of(agreement, clients)

    def share(self, values: dict[str, bytes]) -> None:
        """Give every worker some values. The caller waits for this before it asks for anything else."""
        for slot in self._slots:
            slot.share(**values)

    def run(self, job: Job) -> Any:
        """The result of a job."""
        slot = self._free.get()
        try:
            (result,) = slot.map([_Again(job)], count=1)
            return result
        finally:
            self._free.put(slot)
