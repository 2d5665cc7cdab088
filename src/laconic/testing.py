"""For whoever writes a method or a codec: the laws of laconic as checks, and clients that misbehave.

>>> import laconic as lc
>>> check_method(lc.fedprox(mu=0.1))                                       # silence is consent
>>> check_codec(lc.codecs.topk(0.1) | lc.codecs.eden(2))
>>> attacked = Byzantine(lc.fedmedian(), clients={3, 7}, transform=scaled(-100))

The laws (docs/architecture.md) that a method can break:

2. Same key, same result; client order, number of workers and engine don't matter.
3. A name in personal state never appears in a message.
4. Inputs are never changed in place.
6. One bad client costs that client's reply, not the round.
7. Interrupted and resumed equals uninterrupted, bit for bit.
8. A wrapper that changes nothing is the method.

Besides, broadcasts and messages look as the method's own specs say, leaf by leaf and in the same order.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.codecs import ErrorFeedback, check_codec, parse
from laconic.core import (
    Bound,
    ClientData,
    ClientInfo,
    Codec,
    Key,
    Method,
    Part,
    PayloadError,
    Population,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    bernoulli_names,
    describe,
    drawn,
    isolated,
    on_messages,
    resolve,
    spec_of,
    tree_sha256,
)
from laconic.data import Federation
from laconic.engine import Agreement, Checkpoints, Link, Schedule, Simulation, State, to_everyone
from laconic.engine.round import canonical_json
from laconic.engine.simulate import one_thread
from laconic.engine.workers import Clients
from laconic.evaluations import EVALUATIONS

__all__ = [
    "Byzantine",
    "LawBroken",
    "check_codec",
    "check_method",
    "identity",
    "scaled",
    "small_federation",
    "small_task",
    "with_nan",
]


T = TypeVar("T")


class LawBroken(AssertionError):
    """A method does not keep a law: the message says which, where, and what was seen."""


# --- something small to learn ----------------------------------------------------------------------------------------


def small_task(*, batch_norm: bool = False) -> Task:
    """Four inputs, three classes, a hidden layer and dropout; with `batch_norm`, running statistics as well.

    >>> sorted(small_task().spec)
    ['0.bias', '0.weight', '3.bias', '3.weight']
    """

    def build() -> nn.Module:
        norm: list[nn.Module] = [nn.BatchNorm1d(6, momentum=None)] if batch_norm else []
        return nn.Sequential(nn.Linear(4, 6), *norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))

    return Task(build)


def small_federation(*, clients: int = 6, seed: int = 0) -> Federation:
    """Clients with 2, 5, 8 … examples of their own for `small_task`, each with some to test on.

    >>> [len(small_federation().client(c).train) for c in range(3)]
    [2, 5, 8]
    """
    rng = Key.from_seed(seed).fold_in("small_federation").numpy()
    teacher = rng.standard_normal((4, 3))

    def examples(count: int) -> tuple[Any, Any]:
        x = rng.standard_normal((count, 4)).astype(np.float32)
        return x, (x @ teacher).argmax(axis=1)

    return Federation.from_clients(
        [examples(2 + 3 * c) for c in range(clients)],
        examples(30),
        client_tests=[examples(4) for _ in range(clients)],
        classes=3,
        name="small",
    )


# --- clients that misbehave ------------------------------------------------------------------------------------------

Transform = Callable[[Tree], Tree]


def scaled(factor: float) -> Transform:
    """A lie: the message times `factor`.

    >>> scaled(-100)({"w": torch.ones(2), "count": torch.tensor([3])})
    {'w': tensor([-100., -100.]), 'count': tensor([3])}
    """

    def transform(message: Tree) -> Tree:
        return {name: leaf * factor if leaf.is_floating_point() else leaf for name, leaf in message.items()}

    return transform


def with_nan(message: Tree) -> Tree:
    """A failure: the last value of every floating-point leaf is not a number."""
    spoilt = {name: leaf.clone() for name, leaf in message.items()}
    for leaf in spoilt.values():
        if leaf.is_floating_point() and leaf.numel():
            leaf.view(-1)[-1] = math.nan
    return spoilt


def Byzantine(method: Method, clients: Collection[int], transform: Transform) -> Method:
    """A method some of whose clients send something else than they should: `transform` of their message.

    A transform that raises `PayloadError` makes a client that fails. All else is the method's own.

    >>> import laconic as lc
    >>> method = Byzantine(lc.fedavg(), clients={0}, transform=with_nan)
    >>> run = lc.fit(method=method, data=lc.data.digits(clients=3), rounds=1, cohort=3, workers=0)
    >>> [(r["client"], r["reason"]) for r in run.history[0]["rejections"]]
    [(0, 'non_finite')]
    """

    def lie(message: Tree, client: ClientInfo, key: Key) -> Tree:
        return transform(message) if client.id in clients else message

    return on_messages(method, client=lie)


# --- the examination of a method -------------------------------------------------------------------------------------


def check_method(
    method: Method,
    *,
    task: Task | None = None,
    clients: Clients | None = None,
    lossy: Codec | str = "float16",
    rounds: int = 3,
    cohort: int = 4,
    workers: int = 2,
    seed: int = 0,
) -> None:
    """Raise `LawBroken` with the law that a method breaks, if it breaks one.

    Every function of the method is called by itself, twice and with inputs that must not be written to; then the
    engine runs the method for some rounds: twice, with worker processes (`workers = 0` leaves that out), over a lossy
    link, interrupted and resumed, and with a client whose message is not a number. Give `task` and `clients` (a
    federation) if the method needs others than `small_task` and `small_federation`.
    """
    if not isinstance(method, Method):
        raise LawBroken(f"it is no Method, but of the type {type(method).__name__}.")
    task, clients = task or small_task(), clients or small_federation()
    exact, lossy = parse("float32"), parse(lossy) if isinstance(lossy, str) else lossy
    bound = method.bind(task, Population(clients.num_clients, min(cohort, clients.num_clients)))
    _law(isinstance(bound, Bound), method, f"bind must give a Bound, got {type(bound).__name__}")
    _law(bound.task is task, method, "after bind(task), `task` must be that task")
    try:
        canonical_json(method.settings)
    except (TypeError, ValueError) as error:
        raise LawBroken(f"{method.name}: its settings are no plain JSON ({error}).") from None
    with one_thread():
        _Functions(Agreement(bound, Link(exact, exact), Key.from_seed(seed), method.name), clients).check()
    cohort = clients.num_clients if bound.replica is not None else min(cohort, clients.num_clients)
    schedule = Schedule(rounds=rounds, cohort=cohort, eval_every=2)
    _Runs(method, task, clients, schedule, seed).check(exact, lossy, workers)


def identity(method: Method) -> Method:
    """A wrapper that changes nothing: law 8 says that it is the method.

    >>> import laconic as lc
    >>> identity(lc.fedavg()).settings == lc.fedavg().settings
    True
    """

    def same(message: Tree, client: ClientInfo, key: Key) -> Tree:
        return dict(message)

    return on_messages(method, client=same, server=lambda replies, key: (replace(reply) for reply in replies))


def _law(kept: bool, method: Method | str, otherwise: str, *, number: int | None = None) -> None:
    if not kept:
        name = method if isinstance(method, str) else method.name
        raise LawBroken(f"{name}: {otherwise}." if number is None else f"{name}, law {number}: {otherwise}.")


@dataclass(frozen=True)
class _Made:
    client: ClientInfo
    received: Tree
    personal: Tree
    update: Update
    hashed: str


@dataclass(frozen=True)
class _Functions:
    """The functions of a method, one by one, called as the engine calls them."""

    agreement: Agreement
    clients: Clients

    @property
    def method(self) -> Bound:
        return self.agreement.method

    def check(self) -> None:
        """All of them."""
        method, key = self.method, self.agreement.key.fold_in("init")
        server = self._twice("init", lambda: method.init(key), {})
        updates = [self._local_update(server, c) for c in range(min(self.clients.num_clients, 4))]
        for made in updates:
            now = tree_sha256({**made.update.message, **_marked(made.update.personal)})
            what = f"what client {made.client.id} made changed when other clients were trained: does it share memory?"
            self._law(now == made.hashed, what, number=4)
        new = self._server_update(server, updates)
        hashed = tree_sha256(new)
        self._predictors(server, new, updates)
        self._law(tree_sha256(new) == hashed, "the server's new state changed later: does it share memory?", number=4)

    def _local_update(self, server: Tree, number: int) -> _Made:
        method, agreement = self.method, self.agreement
        client = ClientInfo(number, 1, 0)
        received = self._broadcast(server, client)
        key = agreement.client_key(client)
        first = agreement.key.fold_in("init_client", number)
        personal = self._twice("init_client", lambda: method.init_client(first), {})
        data = self.clients.client(number)
        inputs = {
            **{f"received {name}": leaf for name, leaf in received.items()},
            **{f"personal {name}": leaf for name, leaf in personal.items()},
            **_examples(data),
        }

        def update() -> Update:
            with isolated(key.fold_in("torch")):
                return method.client_update(dict(received), dict(personal), data, client, key)

        made = self._guarded("client_update", update, inputs)
        hashed = tree_sha256({**made.message, **_marked(made.personal)})
        self._another(server, number)
        again = self._guarded("client_update", update, inputs)
        same = tree_sha256({**again.message, **_marked(again.personal)}) == hashed
        self._law(same, "client_update with the same key and inputs gave something else", number=2)
        same = _figures(made.metrics) == _figures(again.metrics)
        self._law(same, "client_update with the same key and inputs gave other metrics", number=2)
        self._check_update(received, made)
        return _Made(client, received, personal, again, hashed)

    def _broadcast(self, server: Tree, client: ClientInfo) -> Tree:
        method, key = self.method, self.agreement.round_key(client.round)
        address = client if method.per_client else to_everyone(client.round)
        received = self._twice("broadcast", lambda: method.broadcast(dict(server), address, key), server)
        self._check_spec("broadcast", received, method.broadcast_spec(address, key), "broadcast_spec")
        steps = method.replica
        if not method.per_client:
            same = tree_sha256(method.broadcast(dict(server), client, key)) == tree_sha256(received)
            self._law(same, "the broadcast depends on the client, but per_client is False", number=2)
        if steps is None:
            self._remembered(received, address)
            return received
        held = steps.first(dict(server))
        self._check_spec("broadcast", received, steps.step_spec(dict(held)), "step_spec")
        inputs = {**{f"held {n}": leaf for n, leaf in held.items()}, **{f"sent {n}": v for n, v in received.items()}}
        after = self._twice("absorb", lambda: steps.absorb(dict(held), dict(received)), inputs)
        again = steps.absorb(dict(after), dict(received))
        self._law(tree_sha256(again) == tree_sha256(after), "the same broadcast, absorbed twice, changes what is held")
        return after

    def _remembered(self, received: Tree, client: ClientInfo) -> None:
        """What a client holds after a broadcast gives that broadcast back: else both ends would part."""
        agreement, memory = self.agreement, self.method.memory
        spec, held = agreement.broadcast_spec(client, None), agreement.first_held()
        begins = agreement.base(received, spec, held)
        floating = {n for n, leaf in spec.items() if leaf.dtype.is_floating_point and not leaf.exact}
        self._law(begins.keys() == floating, f"memory.part gives {sorted(begins)}, but {sorted(floating)} are sent")
        for name, leaf in begins.items():
            self._law(
                leaf.shape == received[name].shape, f"memory.part gives {name!r} another shape than the broadcast"
            )
        after = agreement.base(received, spec, memory.merge(dict(held), dict(received)))
        same = all(torch.equal(after[name], received[name]) for name in floating)
        self._law(same, "memory.part of what memory.merge gives is not what was received")

    def _another(self, server: Tree, number: int) -> None:
        """Somebody else's local update in between, with another key: what it leaves behind must not matter."""
        other = ClientInfo((number + 1) % self.clients.num_clients, 2, 0)
        key = self.agreement.client_key(other)
        received = self.method.broadcast(
            server, other if self.method.per_client else to_everyone(2), self.agreement.round_key(2)
        )
        if (steps := self.method.replica) is not None:
            received = steps.absorb(steps.first(server), received)
        personal = self.method.init_client(self.agreement.key.fold_in("init_client", other.id))
        with isolated(key):
            self.method.client_update(received, personal, self.clients.client(other.id), other, key)

    def _check_update(self, received: Tree, update: Update) -> None:
        method = self.method
        spec = method.message_spec(dict(received))
        sent = drawn(update.message, bernoulli_names(spec), self.agreement.key)
        self._check_spec("message", sent, spec, "message_spec")
        if method.client_metrics is not None:
            unknown = sorted(update.metrics.keys() - set(method.client_metrics))
            self._law(not unknown, f"the metrics {unknown} are not among its client_metrics, so nobody would see them")
        private = sorted(set(update.personal) & set(update.message))
        self._law(not private, f"the message holds {private}, which are names of personal state", number=3)
        stateless = method.personal or not update.personal
        self._law(stateless, f"personal is False, but clients keep {sorted(update.personal)}")
        paper = method.paper_bytes(received, sent)
        good = isinstance(paper, int) and paper >= 0
        self._law(good, f"paper_bytes must be a whole number and not negative, got {paper!r}")

    def _check_spec(self, what: str, tree: Tree, spec: Spec, where: str) -> None:
        exact = {name: leaf for name, leaf in tree.items() if not leaf.is_floating_point()}
        seen, said = describe(spec_of(tree)), describe(resolve(spec, exact))
        self._law(seen == said, f"the {what} is {seen}, but {where} says {said} (the order counts)")

    def _server_update(self, server: Tree, updates: list[_Made]) -> Tree:
        method, key = self.method, self.agreement.round_key(1).fold_in("server")
        replies = [
            Reply(
                replace(made.client, examples=len(self.clients.client(made.client.id).train)),
                drawn(made.update.message, bernoulli_names(method.message_spec(dict(made.received))), key),
                made.received,
            )
            for made in updates
        ]
        inputs = {f"state {name}": leaf for name, leaf in server.items()}
        for reply in replies:
            inputs |= {f"message of {reply.client.id} {name}": leaf for name, leaf in reply.message.items()}
            inputs |= {f"broadcast to {reply.client.id} {name}": leaf for name, leaf in reply.received.items()}

        def update() -> Tree:
            # An iterator, as the engine gives: it can be gone through once.
            return method.server_update(dict(server), iter(replies), key)

        new = self._twice("server_update", update, inputs)
        listed = method.server_update(dict(server), list(replies), key)
        what = "server_update gives something else for a list than for an iterator: go through the replies once"
        self._law(tree_sha256(listed) == tree_sha256(new), what)
        finite = all(bool(leaf.isfinite().all()) for leaf in new.values())
        self._law(finite, "the server's new state is not finite")
        return new

    def _predictors(self, server: Tree, new: Tree, updates: list[_Made]) -> None:
        method, x = self.method, self.clients.test.tensors()[0].to(self.method.task.device)
        made = updates[-1]
        received, personal = self._broadcast(server, made.client), made.update.personal
        models = {"global_model": self._guarded("global_model", lambda: method.global_model(dict(new)), new)}
        if (local_model := method.local_model) is not None:
            inputs = {**received, **_marked(personal)}
            own = self._guarded("local_model", lambda: local_model(dict(received), dict(personal)), inputs)
            models["local_model"] = own
        self._law(not method.own_model or local_model is not None, "own_model is True, but there is no local_model")
        before = {}
        for name, model in models.items():
            self._law(isinstance(model, nn.Module), f"{name} must give a torch module, got {type(model).__name__}")
            self._law(not model.training, f"{name} must be ready to predict: call eval()")
            with torch.no_grad():
                before[name] = model(x)
            self._law(bool(before[name].isfinite().all()), f"{name} predicts values that are not finite")
        self._another(server, 0)
        for name, model in models.items():
            what = f"what {name} predicts changed when a client was trained: is it the working copy?"
            with torch.no_grad():
                self._law(torch.equal(model.eval()(x), before[name]), what, number=4)

    def _twice(self, what: str, function: Callable[[], Tree], inputs: Tree) -> Tree:
        first = self._guarded(what, function, inputs)
        with isolated(Key.from_seed(12345)):  # another state of the world
            again = self._guarded(what, function, inputs)
        same = tree_sha256(first) == tree_sha256(again) and list(first) == list(again)
        self._law(same, f"{what} with the same key and inputs gave something else", number=2)
        return first

    def _guarded(self, what: str, function: Callable[[], T], inputs: Tree) -> T:
        """The result of a function that leaves its inputs and the global generators alone."""
        before, generators = {name: tree_sha256({name: leaf}) for name, leaf in inputs.items()}, _generators()
        with _ReadOnly(inputs, lambda name: self._law(False, f"{what} writes to its input {name!r}", number=4)):
            try:
                result = function()
            except Exception as error:
                error.add_note(
                    f"(in {what} of the method {self.agreement.name!r}, called by laconic.testing.check_method)"
                )
                raise
        for name, leaf in inputs.items():
            self._law(tree_sha256({name: leaf}) == before[name], f"{what} changed its input {name!r}", number=4)
        self._law(_generators() == generators, f"{what} uses a global generator; draw from the key instead", number=2)
        return result

    def _law(self, kept: bool, otherwise: str, *, number: int | None = None) -> None:
        _law(kept, self.agreement.name, otherwise, number=number)


@dataclass(frozen=True)
class _Runs:
    """Whole runs of a method, in which only what must not matter differs."""

    method: Method
    task: Task
    clients: Clients
    schedule: Schedule
    seed: int

    def check(self, exact: Codec, lossy: Codec, workers: int) -> None:
        """All of them."""
        down = lossy.codec if isinstance(lossy, ErrorFeedback) else lossy  # feedback is for the way up
        plain, cheap = Link(exact, exact), Link(lossy, down)
        whole = self._run(self.method, plain)
        self._same(self._run(self.method, plain), whole, "a second run", number=2)
        if workers and "fork" in multiprocessing.get_all_start_methods() and self.task.device == "cpu":
            self._same(self._run(self.method, plain, workers), whole, f"a run with {workers} workers", number=2)
        with _naming(self.method, f"over {lossy.text}"):
            self._same(self._resumed(cheap), self._run(self.method, cheap), "a run that was resumed", number=7)
        self._same(self._run(identity(self.method), plain), whole, "a run of its identity wrapper", number=8)
        self._check_bad_client(plain)

    def _check_bad_client(self, link: Link) -> None:
        bad = {self.clients.num_clients - 1}

        def fail(message: Tree) -> Tree:
            raise PayloadError("failed", "this client fails")

        sent = self._run(Byzantine(self.method, bad, with_nan), link, rejected=bad)
        failed = self._run(Byzantine(self.method, bad, fail), link, rejected=bad)
        # Without floating-point leaves there is nothing that could not be a number.
        if sent.rejected:
            sent.state.ledger = failed.state.ledger  # whether a refused frame was counted is not the method's business
            what = "a run with a client whose messages are not numbers, against one in which it fails"
            self._same(sent, failed, what, number=6)

    def _run(self, method: Method, link: Link, workers: int = 0, *, rejected: Collection[int] = ()) -> _Ended:
        return self._finished(self._simulation(method, link, workers), rejected)

    def _simulation(self, method: Method, link: Link, workers: int = 0) -> Simulation:
        parts = (method, self.task, self.clients, link, self.schedule)
        return Simulation(*parts, seed=self.seed, workers=workers, evaluations=EVALUATIONS)

    def _finished(self, simulation: Simulation, rejected: Collection[int] = (), *, rounds: int | None = None) -> _Ended:
        """Where a run is at its end, or after so many rounds."""
        count = 0
        for record in itertools.islice(simulation, rounds):
            for found in record.get("rejections", []):
                count += 1
                what = f"the reply of client {found['client']} was refused ({found['reason']}: {found['detail']})"
                _law(found["client"] in rejected, self.method, what, number=6)
            if not rejected:  # a round of nobody but bad clients may be abandoned
                what = f"round {record['round']} was abandoned ({record.get('abandoned')})"
                _law("abandoned" not in record, self.method, what, number=6)
        return _Ended(simulation.state, count)

    def _resumed(self, link: Link) -> _Ended:
        """A run that is interrupted after one round and goes on from its checkpoint."""
        stopped = self._finished(self._simulation(self.method, link), rounds=1).state
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder))
            checkpoints.save(stopped, {})
            found = checkpoints.load()
        if found is None:
            raise LawBroken(f"{self.method.name}, law 7: its state left no checkpoint.")
        simulation = self._simulation(self.method, link)
        simulation.state = found[0]
        return self._finished(simulation)

    def _same(self, one: _Ended, other: _Ended, what: str, *, number: int) -> None:
        for part, value in _parts(one.state).items():
            same = value == _parts(other.state)[part]
            _law(same, self.method, f"{what} ended with another {part} than it should", number=number)


@dataclass(frozen=True)
class _Ended:
    state: State
    rejected: int


def _parts(state: State) -> dict[str, Any]:
    """All that a run is, in a form that can be compared."""
    return {
        "round": state.round,
        "server state": (tree_sha256(state.server), list(state.server)),
        "personal state": dict(state.personal),
        "codec state": dict(state.codec),
        "ledger": state.ledger.as_dict(),
        "local evaluation": {client: asdict(score) for client, score in state.local.items()},
        "broadcast": state.downlink and tree_sha256(state.downlink.held),
        "what clients hold": state.memories and dict(state.memories.store),
    }


@contextmanager
def _naming(method: Method, where: str) -> Iterator[None]:
    try:
        yield
    except LawBroken as error:
        raise LawBroken(f"{str(error).removesuffix('.')} ({where}).") from None


class _ReadOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Says so when torch writes to one of some tensors, be it with what they hold already."""

    def __init__(self, tensors: Tree, broken: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, str] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                self._names.setdefault(tensor.untyped_storage().data_ptr(), name)
        self._broken = broken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in written if isinstance(written, list | tuple) else [written]:
                    memory = tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else None
                    if memory in self._names:
                        self._broken(self._names[memory])
        return func(*args, **kwargs)


def _generators() -> tuple[object, ...]:
    """Where the global generators stand."""
    kind, words, *rest = np.random.get_state()
    return torch.random.get_rng_state().tolist(), (kind, np.asarray(words).tolist(), rest), random.getstate()


def _examples(data: ClientData) -> Tree:
    parts: dict[str, Part] = {"train": data.train, "test": data.test}
    return {f"data {n}.{a}": getattr(part, a) for n, part in parts.items() for a in ("x", "y", "index")}


def _marked(personal: Tree) -> Tree:
    return {f"personal {name}": leaf for name, leaf in personal.items()}


def _figures(metrics: Mapping[str, float]) -> dict[str, str]:
    return {name: float(value).hex() for name, value in metrics.items()}  # NaN equals NaN here
