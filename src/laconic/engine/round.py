"""A round, defined once. Every engine carries these bytes; none has a loop of its own.

::

    server state ─broadcast─► tree ─encode(down)─► frame ═══► decode ─► tree
                                                                         │ + personal state + client data
                                                                    client_update
                                                                         │
    server state ◄─server_update─ tree ◄─decode─ frame ◄═══ encode(up) ──┘

What is counted is `len(frame)`, in both directions.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch

from laconic.codecs import parse
from laconic.codecs.feedback import Contraction, ErrorFeedback, with_memory
from laconic.codecs.wire import BROADCAST, Direction, Header, seal, unseal
from laconic.core import (
    Bound,
    ClientData,
    ClientInfo,
    Codec,
    ConfigError,
    Json,
    Key,
    Part,
    PayloadError,
    Population,
    Predictor,
    Reply,
    Shared,
    Spec,
    Task,
    Tree,
    bernoulli_names,
    describe,
    drawn,
    isolated,
    one_of,
    predictions,
    resolve,
    spec_of,
    traits_of,
)
from laconic.models.order import in_quick_order

EVERYONE = ClientInfo(id=BROADCAST, round=0, examples=0)
"""Whom a broadcast is for that all clients share."""
_CHUNK = 500  # examples per forward pass of an evaluation: fixed, so that sums don't depend on the machine


_ROOM = 1 << 16  # bytes that a frame of any message may have


SNAPSHOT = parse("float32")
"""The codec of full snapshots: a tree as it is."""


DownMemory = Literal["auto", "shared", "client"]
"""Whether the server remembers one tree for all clients, or one for each."""


@dataclass(frozen=True)
class Link:
    """The pair of codecs, and what the server remembers of the way down.

    `down_memory` is `"shared"` (one tree for all, one encoding), `"client"` (a tree for each), or `"auto"`: shared
    where all clients take part in every round. `memory` is how many bytes the trees of clients may take.
    """

    up: Codec
    down: Codec
    _: KW_ONLY
    down_memory: DownMemory = "auto"
    memory: int = 2**30

    def __post_init__(self) -> None:
        one_of("link.down_memory", self.down_memory, get_args(DownMemory))
        if isinstance(self.down, ErrorFeedback):
            raise ConfigError(
                f"link.down = {self.down.text!r}: what is lost on the way down is sent later anyway; "
                f"write {self.down.codec.text!r}."
            )
        object.__setattr__(self, "down", with_memory(self.down))


class Held(NamedTuple):
    """What a client has after a broadcast: what its local update gets, and what it keeps for the next."""

    received: Tree
    held: Tree


@dataclass(frozen=True)
class Agreement:
    """What both ends of a run agree on: method (bound to its task), link, and the root of all keys."""

    method: Bound
    link: Link
    key: Key
    name: str = "method"
    """The method's name."""
    settings: Mapping[str, Json] = field(default_factory=dict)
    """The method's settings."""
    max_examples: int = 10_000_000
    """The largest weight that a client may claim in a weighted average."""
    max_value: float = 1e9
    """The largest magnitude that a value of a message may have."""
    secret: Key | None = None
    """On a client's own machine, what it draws from where the server must not know it; a simulation has none."""

    @cached_property
    def fingerprint(self) -> bytes:
        """Eight bytes that differ when model, method, its settings, codecs or seed differ (docs/wire.md)."""
        agreed = {
            "model": describe(self.method.task.spec),
            "method": self.name,
            "settings": self.settings,
            "up": self.link.up.text,
            "down": self.link.down.text,
            "key": self.key.digest.hex(),
        }
        return hashlib.blake2b(canonical_json(agreed).encode(), digest_size=8).digest()

    @cached_property
    def remembers(self) -> bool:
        """Whether a broadcast is sent as a change from what the client holds (see `engine.downlink`), or as it is.

        Without values, integers may be coded given those held. The steps of synchronous SGD are changes of their own
        kind, and sent as they are.
        """
        if self.method.replica is not None:
            return False
        traits = traits_of(self.link.down)
        leaves = self.method.broadcast_spec(EVERYONE, self.round_key(0)).values()
        if any(leaf.dtype.is_floating_point and not leaf.exact for leaf in leaves):
            return not traits.dense
        return traits.conditional

    @cached_property
    def builds_on_held(self) -> bool:
        """Whether a broadcast can only be read by whoever holds what came before it."""
        return self.remembers or self.method.replica is not None

    def check_draws(self, server: Tree) -> None:
        """Refuse a codec that draws bits where no probabilities are sent."""
        if traits_of(self.link.down).draws:
            raise ConfigError(
                f"link.down = {self.link.down.text!r} draws bits, which only clients send; take mask for the way down."
            )
        if not traits_of(self.link.up).draws:
            return
        received = None if self.method.per_client else self.broadcast(server, EVERYONE)
        if received is None or not bernoulli_names(self.method.message_spec(received)):
            raise ConfigError(
                f"link.up = {self.link.up.text!r} draws bits from probabilities, but {self.name} sends none with these "
                "settings; use it with fedpm, without privacy, or take mask."
            )

    @cached_property
    def down(self) -> Codec:
        """The codec of frames down: changes never lead away from what is meant."""
        traits = traits_of(self.link.down)
        scaled = self.remembers and not (traits.exact or traits.literal)
        return Contraction(self.link.down) if scaled else self.link.down

    def memory_for(self, population: Population) -> Literal["shared", "client"] | None:
        """What the server remembers of the way down: one tree for all, one for each client, or none."""
        asked, apart = self.link.down_memory, self.method.per_client
        if not self.builds_on_held:
            return None
        if self.method.replica is not None:
            if asked == "client":
                raise ConfigError(
                    f"link.down_memory = 'client': clients of {self.name} hold replicas of one tree; "
                    "write 'shared', or leave it out."
                )
            return "shared"
        if asked == "shared" and apart:
            raise ConfigError(
                f"link.down_memory = 'shared': {self.name} sends each client a broadcast of its own; "
                "write 'client', or leave it out."
            )
        if asked != "auto":
            return asked
        everyone = population.cohort == population.clients and population.newcomer is None
        return "shared" if everyone and not apart else "client"

    def first_held(self) -> Tree:
        """What everybody holds before the first contact: it follows from the run's key.

        First weights that were given are nobody's before they are sent: there, zeros are held.
        """
        server = self.method.init(self.key.fold_in("init"))
        if self.method.replica is not None:
            return self.method.replica.first(server)
        first = self.method.memory.first
        held = self.method.broadcast(server, EVERYONE, self.round_key(0)) if first is None else first(server)
        if self.method.task.initial is None or not self.remembers:
            return held
        return {n: torch.zeros_like(leaf) if leaf.is_floating_point() else leaf for n, leaf in held.items()}

    def broadcast(self, server: Tree, client: ClientInfo) -> Tree:
        """What the server means to send, before any codec."""
        return self.method.broadcast(server, client, self.round_key(client.round))

    def broadcast_spec(self, client: ClientInfo, held: Tree | None) -> Spec:
        """What a client that holds this knows about the broadcast of a round beforehand."""
        if self.method.replica is not None and held is not None:
            return self.method.replica.step_spec(held)
        return self.method.broadcast_spec(client, self.round_key(client.round))

    def base(self, tree: Tree, spec: Spec, held: Tree | None) -> Tree:
        """Where the quantised leaves of a broadcast begin, for a client that holds this: nothing, if at zero."""
        if held is None or self.method.replica is not None:
            return {}
        exact = {name: tree[name] for name, leaf in spec.items() if leaf.exact or not leaf.dtype.is_floating_point}
        return self.method.memory.part(held, resolve(spec, exact), exact)

    def taken_in(self, decoded: Tree, spec: Spec, held: Tree | None) -> Held:
        """What a client that held this has after a broadcast."""
        if held is None:
            return Held(decoded, decoded)
        if self.method.replica is not None:
            after = self.method.replica.absorb(held, decoded)
            return Held(after, after)
        base = self.base(decoded, spec, held)
        received = {name: leaf + base[name] if name in base else leaf for name, leaf in decoded.items()}
        return Held(received, self.method.memory.merge(held, received))

    def received_of(self, tree: Tree, client: ClientInfo, held: Tree) -> Tree:
        """What a client received of a broadcast, from what it holds afterwards."""
        if self.method.replica is not None:
            return held
        spec = self.broadcast_spec(client, held)
        found = self.base(tree, spec, held) if self.remembers else held
        return {name: found.get(name, tree[name]) for name in spec}

    def round_key(self, round: int) -> Key:
        """What all parties of a round share."""
        return self.key.fold_in("round", round)

    def client_key(self, client: ClientInfo) -> Key:
        """What the server and one client share in a round."""
        return self.round_key(client.round).fold_in("client", client.id)


def canonical_json(value: Json) -> str:
    """The one text of a value: keys in order, no spaces, the shortest form of every number.

    >>> canonical_json({"b": [1, 0.1], "a": None})
    '{"a":null,"b":[1,0.1]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class Score:
    """Sums over examples (over tokens, where each is predicted): loss and metrics. Scores add up."""

    examples: int
    sums: Mapping[str, float]

    def __add__(self, other: Score) -> Score:
        names = self.sums or other.sums
        return Score(self.examples + other.examples, {n: self.sums.get(n, 0.0) + other.sums.get(n, 0.0) for n in names})

    def means(self) -> dict[str, float]:
        """Means per example."""
        return {name: total / self.examples for name, total in self.sums.items()} if self.examples else {}


@dataclass(frozen=True)
class LocalUpdate:
    """A client's local update as the engine sees it: the frame that it sends and what it keeps."""

    frame: bytes
    personal: Tree
    codec_state: Tree
    local: Score | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


# --- frames ----------------------------------------------------------------------------------------------------------


def _sealed(
    agreement: Agreement,
    direction: Direction,
    client: ClientInfo,
    payload: bytes,
    *,
    weight: int = 0,
    codec: Codec | None = None,
) -> bytes:
    codec = codec or (agreement.link.down if direction is Direction.DOWN else agreement.link.up)
    header = Header(
        direction=direction,
        codec=codec.id,
        round=client.round,
        client=client.id,
        fingerprint=agreement.fingerprint,
        weight=weight,
    )
    return seal(header, payload)


def _opened(
    agreement: Agreement, direction: Direction, client: ClientInfo, frame: bytes, *, codec: Codec | None = None
) -> tuple[Header, bytes]:
    codec = codec or (agreement.link.down if direction is Direction.DOWN else agreement.link.up)
    return unseal(
        frame,
        direction=direction,
        codec=codec.id,
        round=client.round,
        client=client.id,
        fingerprint=agreement.fingerprint,
    )


# --- the server's first half -----------------------------------------------------------------------------------------


def send(agreement: Agreement, server: Tree, client: ClientInfo, held: Tree | None = None) -> tuple[bytes, Held]:
    """The frame of the server's broadcast, and what whoever gets it has then: lossy codecs change it.

    `held` is what that client holds, where frames build on that.
    """
    return send_tree(agreement, agreement.broadcast(server, client), client, held)


def send_tree(agreement: Agreement, tree: Tree, client: ClientInfo, held: Tree | None = None) -> tuple[bytes, Held]:
    """The same for a broadcast that is made already."""
    spec = agreement.broadcast_spec(client, held)
    tree = _in_order(tree, spec)
    base = agreement.base(tree, spec, held)
    shared = _shared_down(agreement, spec, client, held)
    change = {name: leaf - base[name] if name in base else leaf for name, leaf in tree.items()}
    codec = agreement.down
    if isinstance(codec, Contraction):
        payload, decoded = codec.sent(change, shared)
    else:
        payload, _ = codec.encode(change, shared, {})
        decoded = codec.decode(payload, spec, shared)
    return _sealed(agreement, Direction.DOWN, client, payload), agreement.taken_in(decoded, spec, held)


def _shared_down(agreement: Agreement, spec: Spec, client: ClientInfo, held: Tree | None) -> Shared:
    key = agreement.round_key(client.round).fold_in("down", client.id)
    return Shared.of(spec, key, held=held if agreement.remembers else None)


def send_snapshot(agreement: Agreement, received: Tree, client: ClientInfo) -> bytes:
    """A full snapshot of what clients have of a broadcast: for one that missed too much, or that evaluates it."""
    spec, shared = _snapshot(agreement, client)
    payload, _ = SNAPSHOT.encode(_in_order(received, spec), shared, {})
    return _sealed(agreement, Direction.DOWN, client, payload, codec=SNAPSHOT)


def _snapshot(agreement: Agreement, client: ClientInfo) -> tuple[Spec, Shared]:
    spec = agreement.broadcast_spec(client, None)
    if agreement.method.replica is not None:  # what goes down are steps: they are not what is held
        spec = spec_of(agreement.first_held())
    return spec, Shared.of(spec, agreement.round_key(client.round).fold_in("snapshot", client.id))


def to_everyone(round: int) -> ClientInfo:
    """The addressee of a broadcast that all clients of a round share."""
    return replace(EVERYONE, round=round)


# --- the client ------------------------------------------------------------------------------------------------------


def receive(agreement: Agreement, frame: bytes, client: ClientInfo, held: Tree | None = None) -> Held:
    """What a client has after the frame that came down; `held` is what it had, where frames build on that."""
    _, payload = _opened(agreement, Direction.DOWN, client, frame)
    spec = agreement.broadcast_spec(client, held)
    decoded = agreement.down.decode(payload, spec, _shared_down(agreement, spec, client, held))
    return agreement.taken_in(decoded, spec, held)


def receive_snapshot(agreement: Agreement, frame: bytes, client: ClientInfo) -> Held:
    """What a client has after a frame of `send_snapshot`."""
    _, payload = _opened(agreement, Direction.DOWN, client, frame, codec=SNAPSHOT)
    spec, shared = _snapshot(agreement, client)
    received = SNAPSHOT.decode(payload, spec, shared)
    if not agreement.remembers:
        return Held(received, received)
    return Held(received, agreement.method.memory.merge(agreement.first_held(), received))


def _in_order(tree: Tree, spec: Spec) -> Tree:
    """The tree with its leaves in the order of its spec: what an encoder writes is what a decoder expects."""
    if tree.keys() != spec.keys():
        odd = sorted(tree.keys() ^ spec.keys())
        raise RuntimeError(f"the method's message and its spec differ in {odd[0]!r}.")
    return {name: tree[name] for name in spec}


def client_round(
    agreement: Agreement,
    received: Tree,
    client: ClientInfo,
    personal: Tree,
    codec_state: Tree,
    data: ClientData,
    *,
    evaluates: bool = True,
) -> LocalUpdate:
    """A local update: learn, evaluate the outcome on the client's own test data, encode what is to be sent."""
    began = time.perf_counter()
    method, codec, key = agreement.method, agreement.link.up, agreement.client_key(client)
    own = key
    if method.secret_draws and agreement.secret is not None:
        own = agreement.secret.fold_in(client.round, client.id)
    with isolated(own.fold_in("torch")):
        update = method.client_update(received, personal, data, client, own)
        local = evaluate(method.task, update.fitted, data.test) if evaluates and update.fitted is not None else None
    spec = method.message_spec(received)
    shared = Shared.of(spec, key.fold_in("up"), received)
    message = _in_order(update.message, spec)
    if not traits_of(codec).draws:
        message = drawn(message, shared.bernoulli, key.fold_in("mask"))
    payload, codec_state = codec.encode(message, shared, codec_state)
    frame = _sealed(agreement, Direction.UP, client, payload, weight=len(data.train))
    return LocalUpdate(frame, update.personal, codec_state, local, update.metrics, time.perf_counter() - began)


# --- the server's second half ----------------------------------------------------------------------------------------


def open_reply(agreement: Agreement, frame: bytes, received: Tree, client: ClientInfo) -> Reply:
    """Decode and check a client's frame; `PayloadError` says why it is refused."""
    codec = agreement.link.up
    try:
        spec = agreement.method.message_spec(received)
        _check_size(frame, spec)
        header, payload = _opened(agreement, Direction.UP, client, frame)
        if not 1 <= header.weight <= agreement.max_examples:
            raise PayloadError("weight", f"a weight of {header.weight}, but 1 to {agreement.max_examples} are allowed")
        shared = Shared.of(spec, agreement.client_key(client).fold_in("up"), received)
        message = codec.decode(payload, spec, shared)
        _check_message(message, spec)
        _check_bounded(message, agreement.max_value)
        reply = Reply(replace(client, examples=header.weight), message, received)
        if agreement.method.replica is not None:
            agreement.method.replica.verify(reply)
    except PayloadError as error:
        raise error.at(client=client.id, round=client.round) from None
    except Exception as error:  # a codec of the user's own that is less careful than ours
        said = PayloadError("codec_error", f"the codec raised {type(error).__name__}: {error}")
        raise said.at(client=client.id, round=client.round) from error
    return reply


def _check_size(frame: bytes, spec: Spec) -> None:
    """A frame that no codec would need for such a message is refused before anything of it is copied."""
    most = _ROOM + 4 * sum(leaf.num_bytes for leaf in spec.values())
    if len(frame) > most:
        raise PayloadError("size", f"a frame of {len(frame):,} bytes, but {most:,} is the most for this message")


def said(agreement: Agreement, metrics: Mapping[str, float]) -> dict[str, float]:
    """What counts of a client's own words: metrics that the method knows, with values that are none too large."""
    known = agreement.method.client_metrics
    return {
        name: value
        for name, value in metrics.items()
        if (known is None or name in known) and (math.isnan(value) or abs(value) <= agreement.max_value)
    }


def _check_message(message: Tree, spec: Spec) -> None:
    """A codec of the user's own may decode anything: names, types and shapes are those of the spec."""
    if list(message) != list(spec):
        odd = sorted(message.keys() ^ spec.keys())
        raise PayloadError(
            "decoded", f"the codec decoded other leaves than agreed, {(odd or list(message))[0]!r} first"
        )
    exact = {name: leaf for name, leaf in message.items() if not spec[name].dtype.is_floating_point}
    for name, leaf in resolve(spec, exact).items():
        got = message[name]
        if got.dtype != leaf.dtype or tuple(got.shape) != leaf.shape:
            raise PayloadError(
                "decoded",
                f"{name!r} was decoded as {got.dtype} {tuple(got.shape)}, but {leaf.dtype} {leaf.shape} was agreed",
            )


def _check_bounded(message: Tree, limit: float) -> None:
    """Values that are finite but absurd would make a mean overflow for everybody."""
    for name, leaf in message.items():
        if leaf.is_floating_point() and leaf.numel():
            low, high = torch.aminmax(leaf)
            largest = max(-float(low), float(high))
            if not largest <= limit:  # which NaN is not either
                raise PayloadError("huge", f"{name!r} holds a value of {largest:.3g}, but {limit:.3g} is the most")


def server_round(agreement: Agreement, server: Tree, replies: Iterable[Reply], round: int) -> Tree:
    """The server's new state."""
    return agreement.method.server_update(server, replies, agreement.round_key(round).fold_in("server"))


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(task: Task, predictor: Predictor, part: Part) -> Score:
    """Loss and metrics of a predictor on some examples."""
    sums = dict.fromkeys(("loss", *task.metrics), 0.0)
    if not len(part):
        return Score(0, sums)
    training, count = predictor.training, 0
    layers = in_quick_order(predictor.eval())
    with torch.no_grad():
        for x, y in part.batches(_CHUNK):
            output, target = task.forward(layers, x.to(task.device)), y.to(task.device)
            rows, labels = predictions(output, target)
            sums["loss"] += float(task.loss(output, target)) * len(labels)
            for name, metric in task.metrics.items():
                sums[name] += float(metric(rows, labels).sum())
            count += len(labels)
    predictor.train(training)
    return Score(count, sums)


def chunks(part: Part) -> list[Part]:
    """A part in the pieces in which it is evaluated, wherever that is done."""
    return [Part(part.x, part.y, rows) for rows in torch.split(part.index, _CHUNK)]
