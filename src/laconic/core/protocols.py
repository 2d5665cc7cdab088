"""The seams: what a method and a codec are to the rest of laconic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from laconic.core.data import ClientData, ClientInfo
from laconic.core.random import Key
from laconic.core.task import Task
from laconic.core.tree import Spec, Tree

Predictor = nn.Module
"""What predicts: an ordinary module from inputs to outputs."""


@dataclass(frozen=True)
class Update:
    """What a client's turn gives.

    `message` travels; `personal` stays with the client; `fitted` is the model that the client ended with,
    which the engine may judge on the client's own test data before it is forgotten.
    """

    message: Tree
    personal: Tree = field(default_factory=dict)
    fitted: Predictor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """A client's message as the server decoded it, with the broadcast that it answers."""

    client: ClientInfo
    message: Tree
    received: Tree


@dataclass(frozen=True)
class Shared:
    """What both ends of a link already know: side information that costs nothing.

    `key` is the same at both ends; `received` is the decoded broadcast (empty on the way down).
    """

    key: Key
    received: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class Method(Protocol):
    """Both halves of an algorithm, written for one client; a frozen dataclass of hyper-parameters.

    `bind` gives it the task of a run. Every other function is pure: inputs are never changed, all state goes in
    and comes out. `stateful` says that clients have personal state; `per_client` says that each client gets a
    broadcast of its own (a sub-model, say) instead of one that all share.
    """

    @property
    def name(self) -> str: ...
    @property
    def stateful(self) -> bool: ...
    @property
    def per_client(self) -> bool: ...

    def bind(self, task: Task) -> Method: ...
    def init(self, key: Key) -> Tree: ...
    def init_client(self, key: Key) -> Tree: ...
    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree: ...
    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec: ...
    def client_update(
        self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key
    ) -> Update: ...
    def message_spec(self, received: Tree) -> Spec: ...
    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree: ...
    def global_model(self, server: Tree) -> Predictor: ...
    def local_model(self, received: Tree, personal: Tree) -> Predictor: ...
    def paper_bytes(self, received: Tree, message: Tree) -> int: ...


@runtime_checkable
class Codec(Protocol):
    """Turns a tree into bytes and back.

    `state` is what the sender remembers between rounds (error feedback), else `{}`. `decode` takes every size
    from `spec`, never from `blob`, and raises `PayloadError` and nothing else on malformed bytes. `text` is the
    codec as it is written in a configuration; `id` is its number on the wire.
    """

    @property
    def text(self) -> str: ...
    @property
    def id(self) -> int: ...

    def init_state(self, spec: Spec) -> Tree: ...
    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]: ...
    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree: ...
