"""What a run will cost, before it is run: its first rounds are rehearsed by the real engine, and the rest is reckoned.

Frames are encoded and decoded, cohorts are drawn and clients miss rounds as in the run. Where training takes too long
for a rehearsal, a client sends what the last one that trained would send. Nothing is evaluated or written.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from laconic.core import (
    Bound,
    ClientData,
    ClientInfo,
    Codec,
    ConfigError,
    Key,
    Loss,
    Method,
    Tree,
    Update,
    did_you_mean,
)
from laconic.data import Federation
from laconic.engine import DownMemory, Record
from laconic.experiment import CodecText, Experiment, Model, experiment, run_settings

Kind = Literal["exact", "estimate"]


@dataclass(frozen=True)
class Network:
    """What joins a client to the server: bits per second each way, and seconds that a message and its answer take."""

    up: float
    down: float
    rtt: float

    def seconds(self, bytes_up: float, bytes_down: float) -> float:
        """How long a client is on the line in a round.

        >>> Network(up=8e6, down=8e6, rtt=0.5).seconds(1e6, 2e6)
        3.5
        """
        return self.rtt + 8 * bytes_down / self.down + 8 * bytes_up / self.up


NETWORKS: Mapping[str, Network] = {
    "lan": Network(1e9, 1e9, 0.001),
    "dsl": Network(10e6, 50e6, 0.03),
    "4g": Network(10e6, 30e6, 0.05),
    "3g": Network(1e6, 4e6, 0.15),
    "iot": Network(60e3, 100e3, 1.0),
}
"""Round numbers for common networks; what yours does, you know better."""


@dataclass(frozen=True)
class Way:
    """Bytes one way: in all, per client and round, and whether they are what the run will count or an estimate."""

    bytes: int
    per_client: float
    kind: Kind


@dataclass(frozen=True)
class Plan:
    """What a run will cost.

    `rehearsed` rounds of `rounds` were made. `client_seconds` is a local update on this machine, `network_seconds` what
    a client waits for the network in a round, `seconds` the whole run where every client is a machine of its own.
    `states_bytes` are the states that clients keep, `checkpoints_bytes` what a run's folder holds, `memory_bytes` the
    most that this process needed so far.
    """

    rounds: int
    rehearsed: int
    clients: int
    cohort: int
    parameters: int
    up: Way
    down: Way
    float32_bytes: int
    client_seconds: float
    network_seconds: float
    seconds: float
    states_bytes: int
    checkpoints_bytes: int
    memory_bytes: int

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def plan(
    *,
    data: Federation,
    model: Model = "mlp",
    method: Method | str = "fedavg",
    up: CodecText | Codec | None = None,
    down: CodecText | Codec | None = None,
    down_memory: DownMemory = "auto",
    memory: int | str = "1 GiB",
    loss: Loss | None = None,
    network: Network | str = "4g",
    seconds: float = 6.0,
    **run: Any,
) -> Plan:
    """What a run of `fit` will cost, rehearsed for about so many `seconds`.

    `network` is a name ("lan", "dsl", "4g", "3g", "iot"), a text ("up=5Mbit,down=20Mbit,rtt=50ms") or a `Network`.

    >>> from laconic.data import digits
    >>> found = plan(data=digits(clients=10), rounds=2, cohort=5)
    >>> found.up.kind, found.up.bytes == 2 * 5 * (40 + 4 * found.parameters)
    ('exact', True)
    """
    settings = run_settings(run, where="plan")
    planned = experiment(
        data=data,
        model=model,
        method=method,
        up=up,
        down=down,
        down_memory=down_memory,
        memory=memory,
        loss=loss,
        hashed=False,
        run=settings,
    )
    return rehearse(planned, network=network, seconds=seconds)


def rehearse(experiment: Experiment, *, network: Network | str = "4g", seconds: float = 6.0) -> Plan:
    """What a run that is ready to start will cost. It is used up by that."""
    line = network_of(network) if isinstance(network, str) else network
    simulation = experiment.simulation
    simulation.evaluations, simulation.workers, simulation.stop = (), 0, None
    rehearsal = _Rehearsal(simulation.method, patience=seconds / 3)
    simulation.agreement = replace(
        simulation.agreement, method=replace(simulation.method, client_update=rehearsal.client_update)
    )
    records: list[Record] = []
    began = time.perf_counter()
    for record in simulation:
        if record.abandoned:
            raise ConfigError(f"the rehearsal failed in round {record.round}: {record.abandoned}.")
        records.append(record)
        if time.perf_counter() - began > seconds and len(records) > 1:
            break
    rounds, cohort = simulation.schedule.rounds, simulation.schedule.cohort
    whole = len(records) == rounds and not rehearsal.repeated
    up, down = (_way(records, rounds, cohort, way, whole) for way in ("bytes_up", "bytes_down"))
    on_line = line.seconds(up.per_client, down.per_client)
    state = simulation.state
    own = sum(len(packed) for store in (state.personal, state.codec) for packed in store.values())
    holders = max(len(state.personal), len(state.codec), 1)
    most = min(simulation.clients.num_clients, rounds * cohort)
    states = int(own / holders * most)
    if state.memories is not None and state.memories.contacts:
        each = state.memories.held_bytes // len(state.memories.contacts)
        states += min(each * most, state.memories.budget)
    parameters = sum(p.numel() for p in simulation.method.task.module.parameters())
    server = _size(state.server) + (0 if state.downlink is None else _size(state.downlink.held))
    return Plan(
        rounds=rounds,
        rehearsed=len(records),
        clients=simulation.clients.num_clients,
        cohort=cohort,
        parameters=parameters,
        up=up,
        down=down,
        float32_bytes=2 * 4 * parameters * cohort * rounds,
        client_seconds=rehearsal.seconds,
        network_seconds=on_line,
        seconds=rounds * (rehearsal.seconds + on_line),
        states_bytes=states,
        checkpoints_bytes=3 * (server + (states if simulation.store == "memory" else 0)),
        # Linux counts in kilobytes, macOS in bytes.
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def network_of(text: str) -> Network:
    """A network by its name ("4g"), or as "up=5Mbit,down=20Mbit,rtt=50ms".

    >>> network_of("up=5Mbit,down=20Mbit,rtt=50ms")
    Network(up=5000000.0, down=20000000.0, rtt=0.05)
    """
    if "=" not in text:
        if text not in NETWORKS:
            raise ConfigError(f"there is no network {text!r}; {did_you_mean(text, list(NETWORKS))}")
        return NETWORKS[text]
    given = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
    if not {"up", "down"} <= given.keys() <= {"up", "down", "rtt"}:
        raise ConfigError(f'a network is a name or "up=5Mbit,down=20Mbit,rtt=50ms", got {text!r}.')
    return Network(_rate(given["up"]), _rate(given["down"]), _delay(given.get("rtt", "0s")))


def _rate(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+)(k|M|G)?bit(?:/s)?", text)
    if not found or not float(found[1]) > 0:
        raise ConfigError(f'a rate is written "5Mbit" or "64kbit", got {text!r}.')
    return float(found[1]) * {None: 1, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]]


def _delay(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+)(ms|s)", text)
    if not found:
        raise ConfigError(f'a delay is written "50ms" or "1s", got {text!r}.')
    return float(found[1]) * (0.001 if found[2] == "ms" else 1)


class _Rehearsal:
    """Local updates: real ones while there is time for them, then the last of them again.

    Where the size of a message follows from what was received, it is one of the same round.
    """

    def __init__(self, method: Bound, *, patience: float) -> None:
        self._method, self._left = method, patience
        self._last: tuple[int, Update] | None = None
        self._took: list[float] = []
        self.repeated = False

    @property
    def seconds(self) -> float:
        """How long a real one took, in the middle."""
        return sorted(self._took)[len(self._took) // 2]

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """A local update."""
        if self._last is not None and self._left <= 0:
            ragged = any(leaf.length is not None for leaf in self._method.message_spec(received).values())
            if self._last[0] == client.round or not ragged:
                self.repeated = True
                return self._last[1]
        began = time.perf_counter()
        update = self._method.client_update(received, personal, data, client, key)
        self._took.append(time.perf_counter() - began)
        self._left -= self._took[-1]
        self._last = client.round, replace(update, fitted=None)
        return update


def _size(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in tree.values())


def _way(records: list[Record], rounds: int, cohort: int, way: str, whole: bool) -> Way:
    """What was counted, and the later rounds as the second half of it goes; exact where that was the `whole` run."""
    made = [record.traffic[way] for record in records]
    of_each = {record.traffic[way] / record.traffic["cohort"] for record in records}
    late = made[len(made) // 2 :]
    total = sum(made) + (rounds - len(made)) * sum(late) / len(late)
    known = whole or len(of_each) == 1
    return Way(round(total), total / (rounds * cohort), "exact" if known else "estimate")
