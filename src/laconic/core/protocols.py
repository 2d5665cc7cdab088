"""The seams: what a method and a codec are to the rest of laconic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast, runtime_checkable

from torch import nn

from laconic.core.data import ClientData, ClientInfo
from laconic.core.errors import ConfigError, one_of
from laconic.core.random import Key
from laconic.core.task import Task
from laconic.core.tree import Spec, Tree, exact_names, expectations

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

    `key` is the same at both ends; `received` is the decoded broadcast (empty on the way down); `exact` names the
    floating-point leaves that must come through as they are; `expected` holds the probability of each bit of some
    leaves of bits.
    """

    key: Key
    received: Tree = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    expected: Tree = field(default_factory=dict)

    @classmethod
    def of(cls, spec: Spec, key: Key, received: Tree | None = None) -> Shared:
        """What both ends know about a message of a spec."""
        return cls(key, received or {}, exact_names(spec), expectations(spec))


@dataclass(frozen=True)
class Artifact:
    """A model in its compact form: what a file must hold besides the architecture. `models.assemble` makes the model.

    | kind | `tree` | `settings` |
    |---|---|---|
    | `weights` | the model's state; zeros cost next to nothing | |
    | `units` | the state that is left, and `#units`: a bit for every unit of the whole model | |
    | `mask` | a bit for every parameter: which of the frozen random weights stay | `seed`, `scale` |
    | `members` | the states of an ensemble, under `0/`, `1/` … | |
    """

    kind: str
    tree: Tree
    settings: Mapping[str, int | float | str] = field(default_factory=dict)


@runtime_checkable
class Compact(Protocol):
    """A method whose model has a form of its own that is smaller than its weights."""

    def artifact(self, server: Tree) -> Artifact:
        """The server's model in its compact form: what `assemble` makes of it predicts exactly as `global_model`."""
        ...


@runtime_checkable
class Prepares(Protocol):
    """A method that wants to know how many of how many clients take part in a round. See `prepared`."""

    def prepare(self, *, clients: int, cohort: int) -> Method:
        """The same method for cohorts of this size."""
        ...


@runtime_checkable
class Ensembled(Protocol):
    """A method whose clients have a model of their own at any time, before their first turn too.

    The models can be brought together in an ensemble; `own_part` says what of a personal state that takes.
    """

    def own_part(self, personal: Tree) -> Tree:
        """What a client would have to send once, so that the server has the client's model."""
        ...


@dataclass(frozen=True)
class Goal:
    """How accurate the server's model must be, and on which data: held-out training data, or the common test set.

    >>> Goal(0.975).figure
    'validation_accuracy'
    """

    accuracy: float
    on: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        if not 0 < self.accuracy <= 1:
            raise ConfigError(f"a goal must be an accuracy above 0 and at most 1, got {self.accuracy}.")
        one_of("goal_on", self.on, ("validation", "test"))

    @property
    def figure(self) -> str:
        """Its name in a record."""
        return "global_accuracy" if self.on == "test" else f"{self.on}_accuracy"


@runtime_checkable
class Phased(Protocol):
    """A method with a phase that ends when the server's model is good enough.

    A method sees no accuracies: after every evaluation the engine compares, and what `advance` gives is the state from
    then on. So the phase is part of the state, and clients learn of it from what they receive.
    """

    def aim(self, server: Tree) -> Goal | None:
        """What ends the phase that the state is in, if anything does."""
        ...

    def advance(self, server: Tree) -> Tree:
        """The state in the next phase."""
        ...


@runtime_checkable
class Lockstep(Protocol):
    """What a method has besides whose clients march in step (synchronous SGD): it says so by `lockstep = True`.

    Every client takes part in every round and holds a replica of the same tree. A broadcast is a step from there: what
    is sent builds on what clients hold, so it can be read with that as side information, and `received` in all other
    functions is what they hold after it. The engine keeps that tree once, for it is the same everywhere; a client on
    a machine of its own keeps it itself.
    """

    @property
    def lockstep(self) -> bool:
        """Whether clients march in step."""
        ...

    def first_held(self, server: Tree) -> Tree:
        """What clients hold before the first broadcast: it comes from the run's key, as the server's first state."""
        ...

    def step_spec(self, held: Tree) -> Spec:
        """What a client that holds this knows about the next broadcast beforehand."""
        ...

    def absorb(self, held: Tree, sent: Tree) -> Tree:
        """What clients hold after a broadcast. The same broadcast again, after a round that was abandoned, changes
        nothing."""
        ...

    def verify(self, reply: Reply) -> None:
        """Raise `PayloadError` where a client does not hold what it should."""
        ...


def lockstep(method: Method) -> Lockstep | None:
    """The method as one whose clients march in step, if it is one."""
    return cast(Lockstep, method) if getattr(method, "lockstep", False) else None


class Method(Protocol):
    """Both halves of an algorithm, written for one client; a frozen dataclass of hyper-parameters.

    `bind` gives it the task of a run. Every other function is pure: inputs are never changed, all state goes in
    and comes out.

    A method may have more: `preferred_link` (two codecs in a configuration's words: what a run uses that names none),
    `prepare` (see `Prepares`) and `artifact` (see `Compact`).
    """

    @property
    def name(self) -> str:
        """The published name, in lower case."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether clients have personal state."""
        ...

    @property
    def per_client(self) -> bool:
        """Whether each client gets a broadcast of its own (a sub-model, say) instead of one that all share."""
        ...

    @property
    def task(self) -> Task:
        """The task that `bind` gave."""
        ...

    def bind(self, task: Task) -> Method:
        """The same method for a task."""
        ...

    def init(self, key: Key) -> Tree:
        """The server's first state."""
        ...

    def init_client(self, key: Key) -> Tree:
        """A client's first personal state, `{}` if none."""
        ...

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """What the server sends (to this client, where `per_client`)."""
        ...

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """What the receiving client knows about the broadcast beforehand."""
        ...

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """A client's turn: what it learns, and what of that it sends."""
        ...

    def message_spec(self, received: Tree) -> Spec:
        """What the server knows about a reply to `received` beforehand."""
        ...

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """The server's new state: fold the replies (at least one) in the order given, don't stack them."""
        ...

    def global_model(self, server: Tree) -> Predictor:
        """What the server predicts with."""
        ...

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """What a client predicts with, from the newest broadcast and its personal state."""
        ...

    def metrics(self, server: Tree) -> Mapping[str, float]:
        """What the server's state says of itself (sparsity and the like), for the records of evaluations."""
        ...

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        """What a paper would print as the cost of this exchange, both ways."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Turns a tree into bytes and back.

    `state` is what the sender remembers between rounds (error feedback), else `{}`. `decode` takes every size
    from `spec`, never from `blob`, and raises `PayloadError` and nothing else on malformed bytes.
    """

    @property
    def text(self) -> str:
        """The codec as it is written in a configuration."""
        ...

    @property
    def id(self) -> int:
        """Its number on the wire."""
        ...

    def init_state(self, spec: Spec) -> Tree:
        """The sender's first state."""
        ...

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        """The bytes of a tree, and the sender's new state."""
        ...

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        """The tree that the bytes stand for."""
        ...


def prepared(method: Method, *, clients: int, cohort: int) -> Method:
    """A bound method, told the size of a cohort where it wants to know: what an engine runs."""
    return method.prepare(clients=clients, cohort=cohort) if isinstance(method, Prepares) else method


def preferred_link(method: Method) -> tuple[str, str]:
    """The codecs up and down that a method's messages are made for, `method.preferred_link`; float32 if it has none."""
    up, down = getattr(method, "preferred_link", ("float32", "float32"))
    return up, down
