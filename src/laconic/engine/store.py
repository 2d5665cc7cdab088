"""Where the engine keeps what belongs to clients: packed trees by client, opaque to everyone but the client.

In memory, or on disk with a file per client and version. A new state is *staged* when a local update ends and *kept*
when its round counts, so that a round that is abandoned leaves no trace. Files are never changed: a checkpoint names
the versions that it means, and a version stays for as long as a checkpoint, or the run itself, means it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch
from torch import Tensor

from laconic.core import Tree
from laconic.engine.files import TEMPORARY, cannot_write, sync_path, write_all

Kind = Literal["memory", "disk"]
_FILE = re.compile(r"([0-9]+)-([0-9]+)\.state")


def pack(tree: Mapping[str, Tensor]) -> bytes:
    """A tree as bytes for our own processes and files; an empty tree is no bytes at all."""
    packable: Tree = {}
    seen: set[int] = set()
    for name, leaf in tree.items():
        leaf = leaf.detach().cpu().contiguous()
        # safetensors refuses leaves that share memory: tied weights, or a state that keeps a tree under two names.
        memory = leaf.untyped_storage().data_ptr()
        packable[name] = leaf.clone() if memory in seen else leaf
        seen.add(memory)
    return safetensors.torch.save(packable) if tree else b""


def unpack(blob: bytes) -> Tree:
    """What `pack` packed.

    >>> import torch
    >>> unpack(pack({"a": torch.ones(2)}))
    {'a': tensor([1., 1.])}
    """
    return dict(safetensors.torch.load(blob)) if blob else {}


class Store(MutableMapping[int, bytes]):
    """Packed state by client. Clients that have none cost nothing.

    `stage` takes in a state and gives a handle to it; `keep` makes it the client's, `discard` forgets it.
    """

    @abstractmethod
    def stage(self, client: int, packed: bytes) -> Any:
        """Take in a state that may come to count."""

    @abstractmethod
    def keep(self, client: int, staged: Any) -> None:
        """From now on this is the client's state."""

    @abstractmethod
    def discard(self, staged: Any) -> None:
        """It will not come to count."""

    def __setitem__(self, client: int, packed: bytes) -> None:
        self.keep(client, self.stage(client, packed))


class ClientStore(Store):
    """In memory."""

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}

    def stage(self, client: int, packed: bytes) -> bytes:
        """The bytes themselves."""
        return packed

    def keep(self, client: int, staged: bytes) -> None:
        """From now on this is the client's state."""
        if staged:
            self._packed[client] = staged
        else:
            self._packed.pop(client, None)

    def discard(self, staged: bytes) -> None:
        """Nothing to do."""

    def __getitem__(self, client: int) -> bytes:
        return self._packed[client]

    def __delitem__(self, client: int) -> None:
        del self._packed[client]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._packed))

    def __len__(self) -> int:
        return len(self._packed)


class Version(NamedTuple):
    """A client's state in a file: its number, its length and its hash."""

    number: int
    num_bytes: int
    sha256: str


class DiskStore(Store):
    """In files `<client>-<version>.state` of one folder; in memory, a line per client.

    A file is written under a temporary name and renamed, and made durable (`pin`) before a checkpoint relies on it.
    Without a folder, the files lie in a temporary one that goes with the store.

    >>> store = DiskStore()
    >>> store[3] = b"first"
    >>> store[3] = b"second"
    >>> store[3], sorted(path.name for path in store.folder.iterdir())
    (b'second', ['3-1.state'])
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="laconic-clients-"))
            weakref.finalize(self, _remove, folder, os.getpid())
        self.folder = folder
        self._index: dict[int, Version] = {}
        self._next = 0
        self._unsynced: set[str] = set()
        self._durable: set[str] = set()
        """Files that a checkpoint may mean: they outlive the version that the run means."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from None

    # --- states ------------------------------------------------------------------------------------------------------

    def stage(self, client: int, packed: bytes) -> tuple[int, Version] | None:
        """Written at once, so that a large cohort does not wait in memory."""
        if not packed:
            return None
        version = Version(self._next, len(packed), hashlib.sha256(packed).hexdigest())
        self._next += 1
        name = _name(client, version.number)
        path, temporary = self.folder / name, self.folder / f"{TEMPORARY}{name}"
        try:
            with temporary.open("wb", buffering=0) as file:
                write_all(file, packed)
            temporary.replace(path)
        except OSError as error:
            raise cannot_write(path, error) from None
        self._unsynced.add(name)
        return client, version

    def keep(self, client: int, staged: tuple[int, Version] | None) -> None:
        """From now on this is the client's state; the one before goes, unless a checkpoint may mean it."""
        before = self._index.pop(client, None)
        if staged is not None:
            self._index[client] = staged[1]
        if before is not None:
            self._forget(_name(client, before.number))

    def discard(self, staged: tuple[int, Version] | None) -> None:
        """Remove its file."""
        if staged is not None:
            self._forget(_name(staged[0], staged[1].number))

    def _forget(self, name: str) -> None:
        if name not in self._durable:
            self._unsynced.discard(name)
            (self.folder / name).unlink(missing_ok=True)

    def __getitem__(self, client: int) -> bytes:
        return (self.folder / _name(client, self._index[client].number)).read_bytes()

    def __delitem__(self, client: int) -> None:
        if client not in self._index:
            raise KeyError(client)
        self.keep(client, None)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._index))

    def __len__(self) -> int:
        return len(self._index)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def pin(self) -> tuple[dict[str, Any], Callable[[], None]]:
        """What a checkpoint must hold to find all states again, and what makes them durable before it counts.

        From now on their files stay, whatever the run does meanwhile, until `prune` is told what checkpoints mean.
        """
        names = sorted(self._unsynced)
        self._unsynced.clear()
        self._durable |= {_name(client, version.number) for client, version in self._index.items()}
        clients = [[client, *version] for client, version in sorted(self._index.items())]
        return {"next": self._next, "clients": clients}, partial(_sync_all, self.folder, names)

    @classmethod
    def found(cls, folder: Path, said: Mapping[str, Any]) -> DiskStore:
        """The store that a checkpoint means; `ValueError` if a file is not what it says."""
        store = cls(folder)
        store._next = int(said["next"])
        for client, *version in said["clients"]:
            expected = Version(*version)
            name = _name(client, expected.number)
            data = (folder / name).read_bytes()
            if len(data) != expected.num_bytes or hashlib.sha256(data).hexdigest() != expected.sha256:
                raise ValueError(f"the state of client {client} in {name} does not match its hash")
            store._index[client] = expected
            store._durable.add(name)
        return store

    def prune(self, meant: set[str]) -> None:
        """Remove every file that neither the run nor a checkpoint (`meant`) means."""
        own = {_name(client, version.number) for client, version in self._index.items()}
        self._durable = set(meant)
        wanted = own | meant
        for path in self.folder.iterdir():
            if path.name.startswith(TEMPORARY) or (_FILE.fullmatch(path.name) and path.name not in wanted):
                path.unlink(missing_ok=True)


def files_of(said: Mapping[str, Any]) -> set[str]:
    """The files that a checkpoint's words about a store mean."""
    return {_name(client, number) for client, number, *_ in said["clients"]}


def _sync_all(folder: Path, names: Sequence[str]) -> None:
    try:
        for name in names:
            sync_path(folder / name)
        sync_path(folder)
    except OSError as error:
        raise cannot_write(folder, error) from None


def _name(client: int, version: int) -> str:
    return f"{client}-{version}.state"


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not a forked worker
        shutil.rmtree(folder, ignore_errors=True)
