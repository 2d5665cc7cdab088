"""Checkpoints: a safetensors file, and a JSON manifest whose appearance makes it count.

The manifest holds the sha256 of the tensors and of itself, so that a cut or altered checkpoint is noticed and the one
before is used. Kept are the newest two and the first. States of clients that lie on disk (`DiskStore`) are files of
their own: the manifest names them with their hashes, and they stay for as long as a kept checkpoint means them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.core import RunError, Tree, prefixed, subtree
from laconic.engine.downlink import Contact, Downlink, Memories
from laconic.engine.files import cannot_write, remove_temporaries, write_atomically
from laconic.engine.ledger import Ledger
from laconic.engine.round import Score
from laconic.engine.simulate import State
from laconic.engine.store import ClientStore, DiskStore, Store, files_of, pack, unpack

_FORMAT = 1
_FILE = re.compile(r"round-([0-9]{6,})\.(json|safetensors)")
log = logging.getLogger("laconic")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients = folder.parent / "clients"

    def save(self, state: State, notes: Mapping[str, Any]) -> None:
        """Write the state, then let older checkpoints go."""
        self.taken(state, notes)()
        self.tidy(state)

    def taken(self, state: State, notes: Mapping[str, Any]) -> Callable[[], None]:
        """What writes the state as it is now, whatever becomes of it meanwhile: all that it needs is packed already."""
        number, tensors = state.round, pack(_tensors(state))
        body: dict[str, Any] = {
            "format": _FORMAT,
            "round": number,
            "ledger": state.ledger.as_dict(),
            "local": {str(client): asdict(score) for client, score in sorted(state.local.items())},
            # safetensors orders leaves by its own rule; their order is part of the state.
            "leaves": {"server": list(state.server)},
            "notes": dict(notes),
        }
        if state.downlink is not None:
            body["leaves"]["held"] = list(state.downlink.held)
            down = state.downlink
            body["downlink"] = {"sent": down.sent, "seen": sorted(down.seen.items()), "from_key": down.from_key}
        if state.memories is not None:
            contacts = [[client, *contact] for client, contact in state.memories.contacts.items()]
            body["memories"] = {"budget": state.memories.budget, "contacts": contacts}
        pinned = {kind: store.pin() for kind, store in _stores(state) if isinstance(store, DiskStore)}
        if pinned:
            body["stores"] = {kind: said for kind, (said, _) in pinned.items()}
        body = json.loads(_canonical(body))  # a copy: the run goes on writing to its own lists

        def write() -> None:
            for _, sync in pinned.values():  # states on disk are durable before the manifest that means them
                sync()
            write_atomically(self._tensors(number), tensors)
            sha256 = hashlib.sha256(tensors).hexdigest()
            write_atomically(self._manifest(number), _signed({**body, "tensors_sha256": sha256}))
            try:
                self._prune()
            except OSError as error:
                raise cannot_write(self.folder, error) from None

        return write

    def tidy(self, state: State) -> None:
        """Remove clients' states that no checkpoint means. Between rounds only: what is staged would go too."""
        try:
            for kind, store in _stores(state):
                if isinstance(store, DiskStore):
                    store.prune(self._meant(kind))
        except OSError as error:
            raise cannot_write(self.folder, error) from None

    def load(self) -> tuple[State, dict[str, Any]] | None:
        """The newest sound checkpoint and its notes; None if there is none at all.

        A damaged one is passed over with a warning; if all are damaged, that is an error.
        """
        rounds = self._rounds()
        for number in reversed(rounds):
            try:
                state, notes = self._read(number)
                self.tidy(state)  # of what rounds after the checkpoint left
                return state, notes
            except Exception as error:  # whatever it is: what cannot be read is damaged
                log.warning("checkpoint %s is damaged (%s); trying the one before", self._manifest(number), error)
        if rounds:
            raise RunError(
                f"none of the {len(rounds)} checkpoints in {self.folder} can be read; "
                "start again without --resume, under another name or with --overwrite."
            )
        return None

    def forget(self, round: int) -> None:
        """Take the checkpoint of a round away: what follows begins at the one before."""
        self._manifest(round).unlink(missing_ok=True)

    def floor(self) -> int:
        """The round before which a resumed run will hardly begin: that of the newest checkpoint but one."""
        rounds = self._rounds()
        return rounds[-2] if len(rounds) > 1 else 0

    def _read(self, round: int) -> tuple[State, dict[str, Any]]:
        manifest = self._manifest(round).read_bytes()
        body = json.loads(manifest, parse_constant=_not_finite, parse_float=_finite)
        del body["sha256"]
        if _signed(body) != manifest:  # byte for byte: 1e5 and 1E5 are the same number, but not the same file
            raise ValueError("its manifest does not match its hash")
        if body["round"] != round:
            raise ValueError(f"it holds round {body['round']}")
        if body["format"] != _FORMAT:
            raise ValueError(f"it has format {body['format']}, this version reads {_FORMAT}")
        tensors = self._tensors(round).read_bytes()
        if hashlib.sha256(tensors).hexdigest() != body["tensors_sha256"]:
            raise ValueError("its tensors do not match their hash")
        tree = unpack(tensors)
        for name, leaf in tree.items():
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                raise ValueError(f"its {name!r} holds values that are not finite")
        state = State(
            round=body["round"],
            server={name: tree[f"server/{name}"] for name in body["leaves"]["server"]},
            personal=self._store("personal", body, tree),
            codec=self._store("codec", body, tree),
            local={int(client): Score(**score) for client, score in body["local"].items()},
            ledger=Ledger(**body["ledger"]),
        )
        if "downlink" in body:
            state.downlink = Downlink(
                {name: tree[f"held/{name}"] for name in body["leaves"]["held"]},
                body["downlink"]["sent"],
                dict(body["downlink"]["seen"]),
                body["downlink"]["from_key"],
            )
        if "memories" in body:
            contacts = {client: Contact(*contact) for client, *contact in body["memories"]["contacts"]}
            state.memories = Memories(body["memories"]["budget"], self._store("memory", body, tree), contacts)
        return state, body["notes"]

    def _store(self, kind: str, body: Mapping[str, Any], tree: Tree) -> Store:
        if kind in body.get("stores", {}):
            return DiskStore.found(self.clients / kind, body["stores"][kind])
        store = ClientStore()
        for client, packed in subtree(kind, tree).items():
            store[int(client)] = packed.numpy().tobytes()
        return store

    def _meant(self, kind: str) -> set[str]:
        """The files of a store that the checkpoints on disk mean."""
        meant: set[str] = set()
        for number in self._rounds():
            try:
                said = json.loads(self._manifest(number).read_bytes())["stores"][kind]
                meant |= files_of(said)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue  # a damaged one, or one of a run that kept its states in memory
        return meant

    def _rounds(self) -> list[int]:
        return sorted(self._files("json"))

    def _files(self, kind: str) -> set[int]:
        matches = (_FILE.fullmatch(path.name) for path in self.folder.glob("round-*"))
        return {int(match[1]) for match in matches if match and match[2] == kind}

    def _prune(self) -> None:
        for number in self._rounds()[1:-2]:
            self._manifest(number).unlink(missing_ok=True)
        for number in self._files("safetensors") - self._files("json"):
            self._tensors(number).unlink(missing_ok=True)
        remove_temporaries(self.folder)

    def _manifest(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.json"

    def _tensors(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"


def _tensors(state: State) -> Tree:
    tree = prefixed("server", state.server)
    if state.downlink is not None:
        tree |= prefixed("held", {name: leaf.contiguous() for name, leaf in state.downlink.held.items()})
    for kind, store in _stores(state):
        if isinstance(store, DiskStore):
            continue
        for client, packed in store.items():
            tree[f"{kind}/{client}"] = torch.from_numpy(np.frombuffer(packed, dtype=np.uint8).copy())
    return tree


def _stores(state: State) -> list[tuple[str, Store]]:
    stores = [("personal", state.personal), ("codec", state.codec)]
    return stores if state.memories is None else [*stores, ("memory", state.memories.store)]


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"a number {text} is not finite")
    return value


def _not_finite(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _signed(body: Mapping[str, Any]) -> bytes:
    # What is hashed is what a reader gets back, so that it does not matter how numbers are printed.
    body = json.loads(_canonical(body))
    return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})
