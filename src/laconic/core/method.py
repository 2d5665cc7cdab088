"""What a method is to the rest of laconic: a record of functions, which a wrapper changes one by one.

::

    Method(name, settings, bind, link)          what a user holds; `bind` gives it the task and the population of a run
    Bound(task, init, broadcast, …)             both halves of the algorithm, written for one client

Every function of a `Bound` is pure: inputs are never changed, all state goes in and comes out, randomness is a key.
What is optional is a field with a default, so a wrapper that changes one function (`dataclasses.replace`) keeps all
others::

    def louder(method):
        def bind(task, population=ALONE):
            bound = method.bind(task, population)
            return replace(bound, client_update=…)
        return replace(method, bind=bind)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from laconic.core.data import ClientData, ClientInfo
from laconic.core.errors import ConfigError, one_of
from laconic.core.population import ALONE, Population
from laconic.core.random import Key
from laconic.core.task import Task
from laconic.core.tree import Spec, Tree

Predictor = nn.Module
"""What predicts: an ordinary module from inputs to outputs."""
Json = Any
"""What JSON can hold: the values of settings."""


@dataclass(frozen=True)
class Update:
    """What a client's local update gives.

    `message` travels; `personal` stays with the client; `fitted` is the model that the client ended with, which the
    engine may evaluate on the client's own test data before it is forgotten. `metrics` are the client's own words about
    its training.
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


@dataclass(frozen=True)
class Goal:
    """How accurate the server's model must be, and on which data: held-out training data, or the common test set.

    >>> Goal(0.975).metric
    'validation_accuracy'
    """

    accuracy: float
    on: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        if not 0 < self.accuracy <= 1:
            raise ConfigError(f"a goal must be an accuracy above 0 and at most 1, got {self.accuracy}.")
        one_of("goal_on", self.on, ("validation", "test"))

    @property
    def metric(self) -> str:
        """Its name among the metrics of an evaluation."""
        return "global_accuracy" if self.on == "test" else f"{self.on}_accuracy"


class Phases(NamedTuple):
    """How a method with a phase that ends at a goal goes on.

    A method sees no accuracies: after every evaluation the engine compares, and what `advance` gives is the server's
    state from then on. So the phase is part of the state, and clients learn of it from what they receive.
    """

    goal: Callable[[Tree], Goal | None]
    """(server): what ends the phase that the state is in, if anything does."""
    advance: Callable[[Tree], Tree]
    """(server): the state in the next phase."""


class Replica(NamedTuple):
    """Synchronous SGD: every client takes part in every round and holds a replica of one tree.

    A broadcast is a step from there: it is read with what clients hold as side information, and `received` in all other
    functions is what they hold after it. The engine keeps that tree once, for it is the same everywhere; a client on a
    machine of its own keeps it itself.
    """

    first: Callable[[Tree], Tree]
    """(server): what clients hold before the first broadcast; it follows from the run's key."""
    step_spec: Callable[[Tree], Spec]
    """(held): what a client that holds this knows about the next broadcast beforehand."""
    absorb: Callable[[Tree, Tree], Tree]
    """(held, sent): what clients hold after a broadcast. The same again (after an abandoned round) changes nothing."""
    verify: Callable[[Reply], None]
    """(reply): raises `PayloadError` where a client does not hold what it should."""


def same_leaves(held: Tree, spec: Spec, exact: Tree) -> Tree:
    """Of a broadcast's floating-point leaves what is held under the same name; zeros of those that are new."""
    base: Tree = {}
    for name, leaf in spec.items():
        if leaf.dtype.is_floating_point and not leaf.exact:
            fits = name in held and tuple(held[name].shape) == leaf.shape
            base[name] = held[name] if fits else torch.zeros(leaf.shape, dtype=leaf.dtype)
    return base


def replaced(held: Tree, received: Tree) -> Tree:
    """What is held, with what was received in place of what it had been."""
    return {**held, **received}


@dataclass(frozen=True)
class Memory:
    """How a broadcast builds on what a client holds of those before it: on the way down its floating-point leaves
    travel as changes from there.

    Unless a method says otherwise, leaves have the same names and shapes in every round. The leaves that pass exactly
    (which groups are alive, which part of the model this is) come first, and may decide what the others are. After a
    merge, the part of the same broadcast is what was received.
    """

    first: Callable[[Tree], Tree] | None = None
    """(server's first state): what everybody holds before the first contact, from the run's key alone; the first
    broadcast, unless said otherwise."""
    part: Callable[[Tree, Spec, Tree], Tree] = same_leaves
    """(held, spec, exact): where the floating-point leaves of a broadcast begin, for a client that holds this. Lengths
    in the spec are those of this broadcast; `exact` are its leaves that pass exactly."""
    merge: Callable[[Tree, Tree], Tree] = replaced
    """(held, received): what a client holds after a broadcast."""


def nothing(key: Key) -> Tree:
    """A client's first personal state where it has none."""
    return {}


def no_metrics(server: Tree) -> Mapping[str, float]:
    """What a server's state says of itself that has nothing to say."""
    return {}


def dense_bytes(received: Tree, message: Tree) -> int:
    """Four bytes per floating-point value, both ways: what a paper prints that does not count bits."""
    return 4 * sum(leaf.numel() for tree in (received, message) for leaf in tree.values() if leaf.is_floating_point())


def remembered(server: Tree, client: int) -> Tree:
    """The state of a server that knows nothing of which clients it has met."""
    return server


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A method bound to the task of a run. See the module's docstring for how to change one function of it."""

    task: Task
    init: Callable[[Key], Tree]
    """(key): the server's first state."""
    broadcast: Callable[[Tree, ClientInfo, Key], Tree]
    """(server, client, key): what the server sends (to this client, where `per_client`)."""
    broadcast_spec: Callable[[ClientInfo, Key], Spec]
    """(client, key): what the receiving client knows about the broadcast beforehand."""
    client_update: Callable[[Tree, Tree, ClientData, ClientInfo, Key], Update]
    """(received, personal, data, client, key): the local update, what a client learns, and what of that it sends."""
    message_spec: Callable[[Tree], Spec]
    """(received): what the server knows about a reply to that beforehand."""
    server_update: Callable[[Tree, Iterable[Reply], Key], Tree]
    """(server, replies, key): the server's new state. Fold the replies (at least one) in order, don't stack them."""
    global_model: Callable[[Tree], Predictor]
    """(server): what the server predicts with."""

    per_client: bool = False
    """Whether each client gets a broadcast of its own (a sub-model, say) instead of one that all share."""
    personal: bool = False
    """Whether clients keep a state of their own between rounds."""
    init_client: Callable[[Key], Tree] = nothing
    """(key): a client's first personal state."""
    forget: Callable[[Tree, int], Tree] = remembered
    """(server, client): the state once a client has lost its personal state, so that it is met as if it were new."""
    local_model: Callable[[Tree, Tree], Predictor] | None = None
    """(received, personal): what a client predicts with, from the newest broadcast and its personal state."""
    own_model: bool = False
    """Whether that is a model of its own, which evaluations then take; else they take what it has just fitted."""
    own_part: Callable[[Tree], Tree] | None = None
    """(personal): what a client would have to send for the server to have its model. Where given, all clients have a
    model of their own at any time, before their first local update too."""
    artifact: Callable[[Tree], Artifact | None] | None = None
    """(server): the model in a compact form, if it has one; what `assemble` makes of it predicts exactly as
    `global_model`."""
    phases: Phases | None = None
    """What ends a phase, and what comes then."""
    replica: Replica | None = None
    """What a method of synchronous SGD has besides."""
    memory: Memory = Memory()
    """How a broadcast builds on what a client holds of those before it."""
    metrics: Callable[[Tree], Mapping[str, float]] = no_metrics
    """(server): what the state says of itself (sparsity and the like), for the records of evaluations."""
    secret_draws: bool = False
    """Whether the server must not know what a client draws: on a machine of its own, a client then has its own key."""
    client_metrics: Collection[str] | None = None
    """The names of `Update.metrics`, where the method says them: of what clients say, nothing else is then recorded."""
    paper_bytes: Callable[[Tree, Tree], int] = dense_bytes
    """(received, message): what a paper would print as the cost of this exchange, both ways."""

    @classmethod
    def of(cls, functions: object, **given: Any) -> Bound:
        """The record of an object's functions: those that have a field's name, and what is `given` besides."""
        named = {field.name: getattr(functions, field.name, None) for field in fields(cls)}
        return cls(**{**{name: value for name, value in named.items() if value is not None}, **given})


class Bind(Protocol):
    """How a method is bound."""

    def __call__(self, task: Task, population: Population = ALONE, /) -> Bound:
        """The method for a task and a population; what does not go together is refused here."""
        ...


@dataclass(frozen=True)
class Method:
    """What a user holds: a name, settings that are plain JSON, and how it is bound to a run.

    `link` names the codecs up and down that its messages are made for: what a run uses that names none.

    >>> from laconic.methods import fedavg
    >>> method = fedavg(lr=0.1)
    >>> method.name, method.settings["lr"], method.link
    ('fedavg', 0.1, ('float32', 'float32'))
    """

    name: str
    settings: Mapping[str, Json]
    bind: Bind = field(repr=False)
    link: tuple[str, str] = ("float32", "float32")


ClientSeam = Callable[[Tree, ClientInfo, Key], Tree]
"""(message, client, key): the message that a client sends instead. The key is the client's own of this round."""
ServerSeam = Callable[[Iterable[Reply], Key], Iterable[Reply]]
"""(replies, key): the replies that the server counts instead, in order, one by one."""


def on_messages(method: Method, *, client: ClientSeam | None = None, server: ServerSeam | None = None) -> Method:
    """The same method with its messages changed: by `client` before they are encoded, by `server` after decoding.

    One seam for clipping, noise, attacks and bounds, over any method. Shapes must stay what `message_spec` says.

    >>> from laconic.methods import fedavg
    >>> def halved(message, client, key):
    ...     return {name: leaf / 2 for name, leaf in message.items()}
    >>> on_messages(fedavg(), client=halved).name
    'fedavg'
    """

    def bind(task: Task, population: Population = ALONE) -> Bound:
        bound = method.bind(task, population)

        def client_update(received: Tree, personal: Tree, data: ClientData, info: ClientInfo, key: Key) -> Update:
            update = bound.client_update(received, personal, data, info, key)
            return update if client is None else replace(update, message=client(update.message, info, key))

        def server_update(state: Tree, replies: Iterable[Reply], key: Key) -> Tree:
            return bound.server_update(state, replies if server is None else server(replies, key), key)

        return replace(bound, client_update=client_update, server_update=server_update)

    return replace(method, bind=bind)
