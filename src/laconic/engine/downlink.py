"""The way down with a codec that is made for changes.

A dense codec sends the broadcast as it is. The others (signs, rotations, sparsifiers) would ruin weights, so the server
sends the *change* from what up-to-date clients hold, and everyone adds what it decodes::

    frame = encode(broadcast − known)        known ← known + decode(frame)        received = known

The server makes the same addition, so it knows what clients train from, and what a codec lost stays in the next
change: error feedback without a word. At the start everybody knows the initial broadcast, which comes from the run's
key; where first weights were given instead, a client's first contact costs a full snapshot. A client that sat out some
rounds is charged the frames that it missed, or a snapshot in float32 (header and four bytes a value) where that is
shorter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from laconic.codecs.wire import HEADER_BYTES
from laconic.core import Tree, num_values, spec_of


@dataclass
class Downlink:
    """What up-to-date clients hold, and who is up to date."""

    known: Tree
    sent: list[int] = field(default_factory=lambda: [0])
    """Bytes of all frames up to each round."""
    seen: dict[int, int] = field(default_factory=dict)
    """The round in which a client was last brought up to date."""
    from_key: bool = True
    """Whether everybody knows the initial broadcast without being sent it."""
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
        >>> down.costs(50, [0, 1]); down.keep(down.known, 50, [0, 1])     # nobody missed anything
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
        return HEADER_BYTES + 4 * num_values(spec_of(self.known))

    def keep(self, known: Tree, frame_bytes: int, clients: Iterable[int]) -> None:
        """A frame went out: this is known now, and these clients are up to date."""
        self.known = known
        self.sent.append(self.sent[-1] + frame_bytes)
        self.seen.update(dict.fromkeys(clients, len(self.sent) - 1))

    def forget(self, client: int) -> None:
        """This client no longer holds anything: next time it gets a snapshot."""
        self.seen[client] = -1
