"""Many runs at a time on a Ray cluster: each in a process of its own, on whatever machine has room.

A task of Ray's forks the run's process there and passes on what it tells, so that a run on another machine is what it
is here. The comparison's folder has to be one that all machines share: runs go on from their checkpoints in it, on
another machine too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from laconic.cluster import Cluster, find_ray, made_with, on_node, places, require_room, unlike_versions
from laconic.comparison.trials import PATIENCE, TICK, Event, Manner, Told, Trial, forked
from laconic.core import LaconicError, RunError

_TRIES = 3  # machines that may die over a run


@dataclass(frozen=True)
class _Going:
    """A run that is with the cluster: since when, and how many machines died over it."""

    trial: Trial
    began: float
    deaths: int = 0


def spread(trials: Sequence[Trial], manner: Manner, cluster: Cluster) -> Told:
    """Run trials on a cluster; gives what they tell, as it comes."""
    with cluster.connected():
        ray = find_ray()

        require_room(cluster)
        manner = replace(manner, out=manner.out.resolve())
        _check_machines(manner.out)
        task = ray.remote(_perform).options(
            num_cpus=cluster.cpus_per_client, num_gpus=cluster.gpus_per_client, max_retries=0
        )
        mailbox = ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=on_node(_here())).remote()
        named = {trial.name: trial for trial in trials}
        pending = [(trial, 0) for trial in trials]
        seconds: dict[str, float] = {}  # how long an entry took with another seed
        going: dict[Any, _Going] = {}
        last: dict[str, Event] = {}
        try:
            while pending or going:
                free = sum(place.slots for place in places(cluster)) or not going
                for _ in range(min(len(pending), free)):
                    # As on one machine: first seeds in order, then the longest first.
                    chosen = max(pending, key=lambda each: seconds.get(each[0].entry, float("inf")))
                    pending.remove(chosen)
                    trial, deaths = chosen
                    ref = task.remote(trial, manner, mailbox, str(Path.cwd()))
                    going[ref] = _Going(trial, time.monotonic(), deaths)
                ended, _ = ray.wait(list(going), num_returns=len(going), timeout=TICK)
                for name, event in ray.get(mailbox.take.remote()):
                    last[name] = event
                    yield named[name], event
                for ref in ended:
                    run = going.pop(ref)
                    reason = _reason(ref)
                    if reason is None and "finished" in last.get(run.trial.name, {}):
                        seconds[run.trial.entry] = time.monotonic() - run.began
                    elif reason == "" and run.deaths + 1 < _TRIES:
                        pending.insert(0, (run.trial, run.deaths + 1))
                    elif reason is not None:
                        yield run.trial, {"failed": reason or f"{_TRIES} machines of the cluster died over it"}
                yield None, None
        finally:
            with suppress(Exception):
                for ref in going:
                    ray.cancel(ref)
                if going:
                    ray.wait(list(going), num_returns=len(going), timeout=PATIENCE)
                ray.kill(mailbox)


class _Mailbox:
    """Where runs on other machines tell how they are."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Event]] = []

    def put(self, name: str, event: Event) -> None:
        self._events.append((name, event))

    def take(self) -> list[tuple[str, Event]]:
        events, self._events = self._events, []
        return events


def _perform(trial: Trial, manner: Manner, mailbox: Any, folder: str) -> None:
    """On a machine of the cluster: the run in a process of its own, which ends with this one."""
    ray = find_ray()

    torch.set_num_threads(1)
    with suppress(OSError):
        os.chdir(folder)
    told = forked([trial], manner, 1, alone=True)
    try:
        for _, event in told:
            if event is not None:
                ray.get(mailbox.put.remote(trial.name, event))
    finally:
        told.close()


def _reason(ref: Any) -> str | None:
    """Why a task failed; None if it did not, and nothing if its machine died."""
    ray = find_ray()

    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", error)
        said = " ".join(str(cause).split())
        return said if isinstance(cause, LaconicError) else f"{type(cause).__name__}: {said}"
    except ray.exceptions.RayError:
        return ""
    return None


def _check_machines(out: Path) -> None:
    """See that every machine has this laconic, and sees the comparison's folder."""
    ray = find_ray()

    token = out / f".seen-{uuid4().hex}"
    token.touch()
    try:
        asked = {
            str(node["NodeManagerAddress"]): ray.remote(_look)
            .options(num_cpus=0, max_retries=0, scheduling_strategy=on_node(node["NodeID"]))
            .remote(token)
            for node in ray.nodes()
            if node["Alive"]
        }
        for name, ref in asked.items():
            try:
                sees, versions = ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                said = "has no laconic like this one" if "failed to import" in str(error) else f"failed ({error.cause})"
                raise RunError(f"the cluster's machine {name} {said}; install the same on all.") from None
            except ray.exceptions.RayError:
                continue  # it is gone: nothing will be sent there
            if unlike := unlike_versions(made_with(), versions):
                raise RunError(f"the cluster's machine {name} {unlike}.")
            if not sees:
                raise RunError(
                    f"the cluster's machine {name} does not see {out}; runs leave their files there, so choose a "
                    "folder (--out) that all machines share."
                )
    finally:
        token.unlink(missing_ok=True)


def _look(token: Path) -> tuple[bool, dict[str, str]]:
    return token.is_file(), made_with()


def _here() -> str:
    ray = find_ray()

    return str(ray.get_runtime_context().get_node_id())
