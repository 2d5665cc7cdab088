"""What clients hold of the way down, and what brings them up to date.

A dense codec sends the broadcast as it is. The others (signs, rotations, sparsifiers) would ruin weights, so the server
sends the *change* from what the client holds, and both ends add what is decoded::

    frame = encode(broadcast − held)        held ← held + decode(frame)        received = held

The server makes the same addition, so it knows what clients train from, and what a codec lost stays in the next
change: error feedback without a word. At first everybody holds the initial broadcast, which comes from the run's key;
where first weights were given instead, zeros. There are two ways to keep account:

* `Memories`: a tree for each client. A contact is one frame, whatever was missed.
* `Downlink`: one tree for all. A frame is encoded once and the same for everyone, which is cheaper where all clients
  take part in every round. Whoever sat out is charged the frames that it missed, or a snapshot in float32 where that is
  shorter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from laconic.codecs.wire import HEADER_BYTES
from laconic.core import Tree, num_values, spec_of
from laconic.engine.store import ClientStore, Store


class Contact(NamedTuple):
    """When a client was last sent something that it holds, and how much memory that takes."""

    round: int
    num_bytes: int


@dataclass
class Memories:
    """What each client holds, packed, as far as `budget` bytes go: who was not seen for longest is forgotten first.

    A client that is forgotten is sent the change from what everybody holds at first.

    >>> memories = Memories(budget=8)
    >>> for client, packed in ((0, b"tree"), (1, b"tree"), (0, b"news"), (2, b"tree")):
    ...     memories.keep(client, 1, memories.store.stage(client, packed), len(packed))
    >>> [memories.of(client) for client in (0, 1, 2)]      # client 1 was not seen for longest
    [b'news', b'', b'tree']
    """

    budget: int
    store: Store = field(default_factory=ClientStore)
    contacts: dict[int, Contact] = field(default_factory=dict)
    """By client, the longest ago first."""
    held_bytes: int = field(init=False, default=0)
    """How much memory they take together."""

    def __post_init__(self) -> None:
        self.held_bytes = sum(contact.num_bytes for contact in self.contacts.values())

    def of(self, client: int) -> bytes:
        """What this client holds; nothing stands for what everybody holds at first."""
        return self.store.get(client, b"")

    def keep(self, client: int, round: int, staged: Any, num_bytes: int) -> None:
        """From now on this is what the client holds (see `Store.stage`)."""
        self._drop(client)
        self.contacts[client] = Contact(round, num_bytes)
        self.held_bytes += num_bytes
        self.store.keep(client, staged)
        while self.held_bytes > self.budget:
            self.forget(next(iter(self.contacts)))

    def forget(self, client: int) -> None:
        """This client no longer holds anything that counts."""
        self._drop(client)
        self.store.pop(client, None)

    def _drop(self, client: int) -> None:
        contact = self.contacts.pop(client, None)
        if contact is not None:
            self.held_bytes -= contact.num_bytes

    def missed(self, client: int, round: int) -> int | None:
        """The rounds since its last contact; None before the first."""
        contact = self.contacts.get(client)
        return None if contact is None else round - contact.round


@dataclass
class Downlink:
    """What up-to-date clients hold, one tree for all, and who is up to date."""

    held: Tree
    sent: list[int] = field(default_factory=lambda: [0])
    """Bytes of all frames up to each round."""
    seen: dict[int, int] = field(default_factory=dict)
    """The round in which a client was last brought up to date."""
    from_key: bool = True
    """Whether everybody holds the first tree without being sent it."""
    oldest: int = 0
    """The round after which frames can still be sent: whoever is further behind gets a snapshot."""

    def since(self, frame_bytes: int, clients: Iterable[int]) -> list[int | None]:
        """The round after which each client is sent all frames; None where it gets a snapshot: needed, or shorter."""
        snapshot, total = self._snapshot(), self.sent[-1] + frame_bytes
        first = 0 if self.from_key else -1
        starts = (self.seen.get(client, first) for client in clients)
        return [at if at >= self.oldest and total - self.sent[at] <= snapshot else None for at in starts]

    def costs(self, frame_bytes: int, clients: Iterable[int]) -> list[int]:
        """Bytes that bring each of these clients up to date, when the newest frame has `frame_bytes`.

        >>> import torch
        >>> down = Downlink({"w": torch.zeros(100)})
        >>> down.costs(50, [0, 1]); down.keep(down.held, 50, [0, 1])     # nobody missed anything
        [50, 50]
        >>> down.costs(50, [0, 2])                                        # client 2 missed a frame
        [50, 100]
        """
        snapshot, total = self._snapshot(), self.sent[-1] + frame_bytes
        return [snapshot if at is None else total - self.sent[at] for at in self.since(frame_bytes, clients)]

    def reach(self) -> int:
        """The round up to which frames will never be asked for again: from there on, a snapshot is shorter."""
        return max(self.oldest, bisect_left(self.sent, self.sent[-1] - self._snapshot()))

    def _snapshot(self) -> int:
        return HEADER_BYTES + 4 * num_values(spec_of(self.held))

    def keep(self, held: Tree, frame_bytes: int, clients: Iterable[int]) -> None:
        """A frame went out: this is held now, and these clients are up to date."""
        self.held = held
        self.sent.append(self.sent[-1] + frame_bytes)
        self.seen.update(dict.fromkeys(clients, len(self.sent) - 1))

    def forget(self, client: int) -> None:
        """This client no longer holds anything: next time it gets a snapshot."""
        self.seen[client] = -1

    def missed(self, client: int, round: int) -> int | None:
        """The rounds since it was last brought up to date; None before the first."""
        at = self.seen.get(client, -1)
        return None if at < 0 else round - at
