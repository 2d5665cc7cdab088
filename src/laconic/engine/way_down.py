"""The way down in one round: one frame for all clients, or one for each.

Which it is follows from the method (a broadcast for each client) and from what the server remembers (see
`engine.downlink`). Nothing of the state changes before `keep`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from laconic.core import ClientInfo, Tree
from laconic.engine.downlink import Downlink, Memories
from laconic.engine.round import Agreement, send, to_everyone
from laconic.engine.store import pack, unpack
from laconic.engine.workers import Done, Failure, Pool

if TYPE_CHECKING:
    from laconic.engine.simulate import State


class WayDown(ABC):
    """What goes down in a round, what clients then have, and what it costs.

    `figures` are the bytes of first contacts and of snapshots, where there were any, and the mean staleness: the rounds
    since a client's last contact, over the clients that had one.
    """

    def __init__(self, memory: Downlink | Memories | None, round: int) -> None:
        self._memory, self._round = memory, round
        self._first = self._snapshots = 0
        self._missed: list[int] = []

    @abstractmethod
    def held(self, client: int) -> bytes | None:
        """What goes along with a client's local update: what it holds, if it is sent a frame of its own."""

    @abstractmethod
    def sent(self, client: ClientInfo, result: Done | Failure) -> int:
        """Bytes that went down for a result; called once for each client."""

    @abstractmethod
    def received(self, client: ClientInfo, result: Done) -> Tree:
        """The decoded broadcast that a result answers."""

    @abstractmethod
    def keep(self, cohort: Sequence[int], unheard: Collection[int]) -> None:
        """Whatever comes of the round: what was heard is held from now on."""

    def figures(self) -> dict[str, float]:
        """For the round's record."""
        found: dict[str, float] = {"bytes_down_first": self._first, "bytes_down_snapshot": self._snapshots}
        found = {name: value for name, value in found.items() if value}
        return {**found, **({"staleness": sum(self._missed) / len(self._missed)} if self._missed else {})}

    def _count(self, client: int, num_bytes: int, *, snapshot: bool = False) -> None:
        if self._memory is None or not num_bytes:
            return
        missed = self._memory.missed(client, self._round)
        if missed is None and not snapshot:
            self._first += num_bytes
        if snapshot:
            self._snapshots += num_bytes
        if missed is not None:
            self._missed.append(missed)


class ToAll(WayDown):
    """One frame, encoded once, decoded once by every worker. It builds on the one tree that all hold, if on any."""

    def __init__(self, agreement: Agreement, state: State, pool: Pool, round: int, cohort: Sequence[int]) -> None:
        super().__init__(state.downlink, round)
        self._downlink, everyone = state.downlink, to_everyone(round)
        held = None if state.downlink is None else state.downlink.held
        frame, self._has = send(agreement, state.server, everyone, held)
        self._num_bytes = len(frame)
        shared = {"frame": frame, "round": round.to_bytes(4, "little")}
        costs, snapshots = [len(frame)] * len(cohort), [False] * len(cohort)
        if state.downlink is not None:
            shared["held"] = pack(state.downlink.held)
            costs = state.downlink.costs(len(frame), cohort)
            snapshots = [at is None for at in state.downlink.since(len(frame), cohort)]
        self._costs = dict(zip(cohort, zip(costs, snapshots, strict=True), strict=True))
        pool.share(**shared)

    def held(self, client: int) -> None:
        """Nothing: workers know what all hold."""
        return

    def sent(self, client: ClientInfo, result: Done | Failure) -> int:
        """The frame, and those that the client missed, or a snapshot."""
        cost, snapshot = self._costs[client.id]
        num_bytes = cost if result.down is None else result.down
        self._count(client.id, num_bytes, snapshot=snapshot)
        return num_bytes

    def received(self, client: ClientInfo, result: Done) -> Tree:
        """The same for all."""
        return self._has.received

    def keep(self, cohort: Sequence[int], unheard: Collection[int]) -> None:
        """Everybody who heard the frame is up to date."""
        if self._downlink is not None:
            heard = [client for client in cohort if client not in unheard]
            self._downlink.keep(self._has.held, self._num_bytes, heard)


class _Reached(NamedTuple):
    """A client that holds something new: a handle of the store, and its size."""

    client: int
    staged: Any
    num_bytes: int


class ToEach(WayDown):
    """A frame for each client, made where its local update is computed."""

    def __init__(self, agreement: Agreement, state: State, pool: Pool, round: int) -> None:
        super().__init__(state.memories, round)
        self._agreement, self._memories, self._server = agreement, state.memories, state.server
        self._reached: list[_Reached] = []
        number = round.to_bytes(4, "little")
        if agreement.method.per_client:
            self._common = None
            pool.share(server=pack(state.server), round=number)
        else:
            self._common = agreement.broadcast(state.server, to_everyone(round))
            pool.share(broadcast=pack(self._common), round=number)

    def held(self, client: int) -> bytes:
        """The client's own tree; nothing stands for what everybody holds at first."""
        return b"" if self._memories is None else self._memories.of(client)

    def sent(self, client: ClientInfo, result: Done | Failure) -> int:
        """The frame. Who is known to have got it holds what it made."""
        num_bytes = result.down
        if num_bytes is None:  # a worker died before it could say
            held = (unpack(self.held(client.id)) or self._agreement.first_held()) if self._memories else None
            num_bytes = len(send(self._agreement, self._server, client, held)[0])
        self._count(client.id, num_bytes)
        if self._memories is not None and result.held and not (isinstance(result, Failure) and not result.heard):
            staged = self._memories.store.stage(client.id, result.held)
            self._reached.append(_Reached(client.id, staged, len(result.held)))
        return num_bytes

    def received(self, client: ClientInfo, result: Done) -> Tree:
        """From what the client holds now."""
        return self._agreement.received_of(self._tree(client), client, unpack(result.held))

    def keep(self, cohort: Sequence[int], unheard: Collection[int]) -> None:
        """Each that was reached holds what it was sent."""
        if self._memories is not None:
            for client, staged, num_bytes in self._reached:
                self._memories.keep(client, self._round, staged, num_bytes)

    def _tree(self, client: ClientInfo) -> Tree:
        return self._agreement.broadcast(self._server, client) if self._common is None else self._common
