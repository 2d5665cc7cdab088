"""A client's own states, on its own node.

The server never sees them: it holds their names, and names at each local update the state that counts. So one that came
too late, was refused, or belonged to a round that was abandoned leaves no trace, as in the embedded engine, and a
server that goes on from a checkpoint finds its clients as that checkpoint left them.

They lie in Flower's `context.state`, which lives as long as one `flwr run` and its SuperNode; or, where the node's
configuration names a folder, in files, which outlive both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from laconic.core import Tree
from laconic.engine.files import TEMPORARY, cannot_write, write_atomically
from laconic.engine.store import pack, unpack
from laconic.flower.messages import held_name


class Lost(Exception):
    """The node does not hold a state that the server means."""


class FolderEntries(MutableMapping[str, bytes]):
    """Named bytes as files of one folder, each written whole or not at all, for this user alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise cannot_write(folder, error) from None

    def __getitem__(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: bytes) -> None:
        write_atomically(self.folder / name, value, mode=0o600)

    def __delitem__(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(p.name for p in self.folder.iterdir() if not p.name.startswith(TEMPORARY)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class States:
    """Versions of a client's states among named bytes.

    >>> states = States({})
    >>> first = states.put("personal", 3, b"state")
    >>> states.get("personal", first), states.get("personal", "")
    (b'state', b'')
    """

    def __init__(self, entries: MutableMapping[str, bytes]) -> None:
        self._entries = entries

    def put(self, kind: str, round: int, packed: bytes) -> str:
        """Keep a state that a round made; gives its name. No bytes are no state."""
        if not packed:
            return ""
        name = f"{round}.{hashlib.sha256(packed).hexdigest()[:32]}"
        self._entries[f"{kind}.{name}"] = packed
        return name

    def get(self, kind: str, name: str) -> bytes:
        """The state of that name; `Lost` if the node does not have it, or not as it was."""
        if not name:
            return b""
        try:
            packed = self._entries[f"{kind}.{name}"]
        except KeyError:
            raise Lost(f"the {kind} state of round {name.split('.')[0]} is not here") from None
        if hashlib.sha256(packed).hexdigest()[:32] != name.split(".")[1]:
            raise Lost(f"the {kind} state of round {name.split('.')[0]} is damaged")
        return packed

    def hold(self, round: int, held: Tree) -> str:
        """Keep what the client holds after a round's broadcast; gives its name, by which both ends know it."""
        name = held_name(round, held)
        self._entries[f"held.{name}"] = pack(held)
        return name

    def held(self, name: str) -> Tree:
        """What the client held under a name; `Lost` if the node does not have it, or not as it was."""
        after = name.partition(".")[0]
        try:
            held = unpack(self._entries[f"held.{name}"])
        except KeyError:
            raise Lost(f"what it held after round {after} is not here") from None
        except Exception as error:  # whatever it is: what cannot be read is damaged
            raise Lost(f"what it held after round {after} cannot be read ({type(error).__name__})") from None
        if held_name(int(after), held) != name:
            raise Lost(f"what it held after round {after} is damaged")
        return held

    def newest_held(self) -> tuple[int, Tree] | None:
        """What the client holds, and after which round, where all clients hold the same."""
        names = sorted(self._of("held"), key=lambda name: int(name.split(".")[0]))
        return (int(names[-1].split(".")[0]), self.held(names[-1])) if names else None

    def prune(self, kind: str, *, floor: int, meant: str) -> None:
        """Let go of what counted before round `floor`, but not of what counted in it, nor of what is meant."""
        names = self._of(kind)
        made = {name: int(name.split(".")[0]) for name in names}
        counted = max((number for number in made.values() if number <= floor), default=0)
        for name in names:
            if made[name] < counted and name != meant:
                del self._entries[f"{kind}.{name}"]

    def _of(self, kind: str) -> list[str]:
        return [entry.removeprefix(f"{kind}.") for entry in self._entries if entry.startswith(f"{kind}.")]
