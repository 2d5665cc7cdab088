"""Part of the model stays on the device: LG-FedAvg, and any other method with private leaves.

| symbol | here |
|---|---|
| ℓ_m | device m's private leaves: personal state, never on the wire |
| g | the leaves that are shared: all that the wrapped method ever sees |
| a_m | weights of a local objective (a decoder, an adversary); private too |
| P, P_g | number of parameters, in all and of g |
| M, C, R | devices, fraction of them in a round, rounds |

A round: the server sends g; each sampled device trains ℓ_m and g end to end on its own data and returns g only; the
server combines the g's as the wrapped method does. The wrapped method is bound to a task whose state is g alone
(`Task.keeping`), so that its prior, its messages and its M-step know nothing of what is private.

Before that, phase A may train the whole model in the ordinary way. Phase B begins by copying that model to the devices:
a device's first turn in phase B brings the private leaves down once (counted like everything else), and from then on
they are its own.

Liang et al., "Think locally, act globally: federated learning with local and global representations", 2020.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import torch

from laconic.core import (
    ClientData,
    ClientInfo,
    ConfigError,
    Goal,
    Key,
    Leaf,
    Method,
    Predictor,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    bound_task,
    did_you_mean,
    num_values,
    one_of,
    prefixed,
    read_state,
    subtree,
)
from laconic.methods.objectives import Objective
from laconic.methods.solvers import Solver, fit
from laconic.methods.submodel import SubModel

Start = Literal["server", "own"]
End = Literal["first", "last"]

_FIRST = "#first"  # of a broadcast: whether the private leaves come along
_ALL = "#all"  # of a broadcast, where a goal ends phase A: whether it is one of phase A
_LOCAL, _AUX, _INNER, _WHOLE, _PART, _MET = "local", "aux", "inner", "whole", "part", "met"


@dataclass(frozen=True)
class Depth:
    """Private leaves by where they stand: whole layers from one end of the model.

    Either all layers but `shared_layers` at the other end, or as many as fit into `fraction` of the parameters.

    >>> spec = {"fc1.weight": Leaf((8, 4)), "fc1.bias": Leaf((8,)), "fc2.weight": Leaf((3, 8)), "fc2.bias": Leaf((3,))}
    >>> Depth(end="first", shared_layers=1).chosen(spec)
    ['fc1.weight', 'fc1.bias']
    >>> Depth(end="last", fraction=0.5).chosen(spec)
    ['fc2.weight', 'fc2.bias']
    """

    end: End = "first"
    shared_layers: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        one_of("end", self.end, get_args(End))
        if (self.shared_layers is None) == (self.fraction is None):
            raise ConfigError("private leaves by depth need either shared_layers or fraction.")
        if self.shared_layers is not None and self.shared_layers < 0:
            raise ConfigError(f"the number of global layers must not be negative, got {self.shared_layers}.")
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise ConfigError(f"the private fraction must lie in [0, 1], got {self.fraction}.")

    def chosen(self, spec: Spec) -> list[str]:
        """The private leaves, in the model's order."""
        layers = _layers(spec)
        names = list(layers) if self.end == "first" else list(reversed(layers))
        if self.shared_layers is not None:
            private = names[: max(0, len(names) - self.shared_layers)]
        else:
            budget, private = (self.fraction or 0.0) * num_values(spec), []
            for name in names:
                budget -= sum(spec[leaf].size for leaf in layers[name])
                if budget < 0:
                    break
                private.append(name)
        return [leaf for layer in layers if layer in private for leaf in layers[layer]]


Leaves = tuple[str, ...] | Depth
"""Which leaves are private: patterns such as `"features.*"`, or by depth."""


@dataclass(frozen=True)
class KeepLocal:
    """A method whose clients keep some leaves of the model to themselves.

    With nothing private it is the wrapped method, bit for bit. `first` (or the method itself) trains the whole model
    for `first_rounds` rounds before, or until the server's model reaches a `goal`, whichever comes first. Devices start
    phase B from the server's model (`start = "server"`, sent once with their first turn), or from weights that each
    draws from its own key (`"own"`, which costs nothing).

    A device whose first turn comes after round `warmup_after` trains its private leaves alone for `warmup_epochs`
    first. `alone` allows that everything is private. `objective` is what devices learn beside the task.

    >>> from laconic.methods import fedavg
    >>> from laconic.testing import small_task
    >>> lg = KeepLocal(fedavg(), ("0.*",)).bind(small_task())
    >>> list(lg.message_spec({}))
    ['3.weight', '3.bias']
    """

    method: Method
    leaves: Leaves
    called: str = ""
    first: Method | None = None
    first_rounds: int = 0
    goal: Goal | None = None
    start: Start = "server"
    warmup_epochs: int = 0
    warmup_after: int = 0
    alone: bool = False
    objective: Objective | None = None
    bound: Task | None = None

    def __post_init__(self) -> None:
        one_of("start", self.start, get_args(Start))
        for name in ("first_rounds", "warmup_epochs", "warmup_after"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}.")
        if self.start == "own" and self._has_phase_a:
            raise ConfigError(
                "start = 'own' goes without rounds on the whole model: after them, devices start from that model."
            )
        if isinstance(self.method, SubModel):
            raise ConfigError(
                f"{self.method.name} cuts units through the whole model, so no leaf of it can stay private; "
                "use another method."
            )

    # --- what is private ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The given name, or the wrapped method's with a mark."""
        return self.called or f"{self.method.name}+local"

    @property
    def solver(self) -> Solver:
        """The wrapped method's."""
        solver: Solver = self.method.solver  # type: ignore[attr-defined]
        return solver

    @property
    def task(self) -> Task:
        """The task that `bind` gave."""
        return bound_task(self.bound, self.name)

    def bind(self, task: Task) -> Method:
        """The same method for a task; the wrapped method itself where nothing is private."""
        bound = replace(self, bound=task)
        if not bound.private and self.objective is not None:
            raise ConfigError(f"{self.name}: a local objective needs private leaves, but none is private.")
        if not bound.private and self.first is None:
            return self.method.bind(task)
        _ = bound._part
        if self.goal is not None:
            bound._check_plain()
        return bound

    def _check_plain(self) -> None:
        """With a goal nobody knows the phase beforehand, so both phases send the same leaves, more or less of them."""
        whole, part = (m.broadcast_spec(ClientInfo(0, 1, 0), Key.from_seed(0)) for m in (self._whole, self._part))
        if whole != self.task.spec or part != {name: whole[name] for name in whole if name not in self.private}:
            raise ConfigError(
                f"{self.name}: a goal needs methods that send plain weights, which {self._whole.name} and "
                f"{self.method.name} do not both; give the rounds on the whole model instead."
            )

    @cached_property
    def private(self) -> tuple[str, ...]:
        """Names of the private leaves."""
        spec = self.task.spec
        if isinstance(self.leaves, Depth):
            chosen = set(self.leaves.chosen(spec))
        else:
            chosen = set()
            for pattern in self.leaves:
                found = fnmatch.filter(spec, pattern)
                if not found:
                    hint = did_you_mean(pattern, [*spec, *(f"{layer}.*" for layer in _layers(spec))])
                    raise ConfigError(f"{self.name}: no leaf of the model matches {pattern!r}; {hint}")
                chosen.update(found)
        if chosen and not self.alone and not (self.task.moving.keys() - chosen):
            raise ConfigError(
                f"{self.name}: every leaf that is trained would be private, so that nothing is learnt together; "
                "share a layer at least, or use local_only."
            )
        return tuple(name for name in spec if name in chosen)

    @property
    def stateful(self) -> bool:
        """Devices keep their private leaves."""
        return bool(self.private) or self.method.stateful

    @property
    def per_client(self) -> bool:
        """Whoever comes for the first time gets more."""
        return self.start == "server" or self.method.per_client

    @cached_property
    def _whole(self) -> Method:
        """Phase A: the whole model."""
        return (self.first or self.method).bind(self.task)

    @cached_property
    def _task(self) -> Task:
        """The task of phase B: private leaves are no part of its state."""
        spec = self.task.spec
        return self.task.keeping({n: torch.zeros(spec[n].shape, dtype=spec[n].dtype) for n in self.private})

    @cached_property
    def _part(self) -> Method:
        """Phase B, wherever values of private leaves do not matter."""
        return self.method.bind(self._task)

    def _with(self, private: Tree) -> Method:
        return self.method.bind(self._task.keeping(private))

    @property
    def _has_phase_a(self) -> bool:
        return self.first_rounds > 0 or self.goal is not None

    # --- server ------------------------------------------------------------------------------------------------------

    def init(self, key: Key) -> Tree:
        """Phase A's state, or phase B's at once."""
        if self._has_phase_a:
            return prefixed(_WHOLE, self._whole.init(key))
        return self._begun(self._part.init(key), self.task.init(key))

    def init_client(self, key: Key) -> Tree:
        """What the wrapped method keeps; private leaves too, where devices draw their own."""
        inner = prefixed(_INNER, self._part.init_client(key))
        if self.start == "server":
            return inner
        weights = self.task.init(key)
        return {**inner, **prefixed(_LOCAL, {name: weights[name] for name in self.private})}

    def _begun(self, part: Tree, weights: Tree) -> Tree:
        start = {name: weights[name].clone() for name in self.private}
        return {**prefixed(_PART, part), **prefixed(_LOCAL, start), _MET: torch.zeros(0, dtype=torch.int64)}

    def _at(self, server: Tree, round: int) -> Tree:
        """The state as a round needs it: after `first_rounds` phase B begins, whether a goal was reached or not."""
        over = round > self.first_rounds if self.first_rounds else self.goal is None
        return self.advance(server) if over else server

    def aim(self, server: Tree) -> Goal | None:
        """The goal, in phase A."""
        return None if _MET in server else self.goal

    def advance(self, server: Tree) -> Tree:
        """The end of phase A: its model is where phase B begins."""
        whole = subtree(_WHOLE, server)
        if not whole:
            return server
        weights = subtree("w", whole)
        if weights.keys() != self.task.spec.keys():
            raise ConfigError(
                f"{self.name}: {self._whole.name} keeps no single model that devices could start from; "
                "set the rounds on the whole model to 0."
            )
        task = replace(self._task, initial=weights)
        return self._begun(self.method.bind(task).init(Key.from_seed(0)), weights)

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """The whole model in phase A; the shared leaves in phase B, and at a device's first turn the private ones."""
        state = self._at(server, client.round)
        if _MET not in state:
            whole = self._whole.broadcast(subtree(_WHOLE, state), client, key)
            return whole if self.goal is None else self._disguised(whole)
        shared = self._part.broadcast(subtree(_PART, state), client, key)
        if self.start == "own":
            return shared
        new = not bool((state[_MET] == client.id).any())
        start = {n: leaf.reshape(-1) if new else leaf.new_zeros(0) for n, leaf in subtree(_LOCAL, state).items()}
        phase = {} if self.goal is None else {_ALL: torch.tensor([False])}
        return {**phase, _FIRST: torch.tensor([new]), **prefixed(_LOCAL, start), **shared}

    def _disguised(self, whole: Tree) -> Tree:
        """Phase A's broadcast in the form of phase B's, with a bit that says what it is."""
        private = {name: whole[name].reshape(-1) for name in self.private}
        shared = {name: leaf for name, leaf in whole.items() if name not in private}
        return {_ALL: torch.tensor([True]), _FIRST: torch.tensor([True]), **prefixed(_LOCAL, private), **shared}

    def _revealed(self, received: Tree) -> Tree:
        """What phase A's method sees of a broadcast."""
        if self.goal is None:
            return received
        leaves = {name: received.get(name, received.get(f"{_LOCAL}/{name}")) for name in self.task.spec}
        return {name: leaf.reshape(self.task.spec[name].shape) for name, leaf in leaves.items() if leaf is not None}

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """As long as the bit says."""
        if self.goal is None and client.round <= self.first_rounds:
            return self._whole.broadcast_spec(client, key)
        shared = self._part.broadcast_spec(client, key)
        if self.start == "own":
            return shared
        spec: Spec = {} if self.goal is None else {_ALL: Leaf((1,), torch.bool)}
        spec[_FIRST] = Leaf((1,), torch.bool)
        for name in self.private:
            leaf = self.task.spec[name]
            spec[f"{_LOCAL}/{name}"] = Leaf((leaf.size,), leaf.dtype, length=_IfFirst(leaf.size), exact=leaf.exact)
        return {**spec, **shared}

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """The wrapped method's M-step on what it sees; who replied has private leaves from now on."""
        stream = iter(replies)
        head = next(stream)
        state = self._at(server, head.client.round)
        if _MET not in state:
            whole = (replace(reply, received=self._revealed(reply.received)) for reply in _again(head, stream))
            return prefixed(_WHOLE, self._whole.server_update(subtree(_WHOLE, state), whole, key))
        met = set(state[_MET].tolist())

        def seen() -> Iterator[Reply]:
            for reply in _again(head, stream):
                if self.start == "server":
                    met.add(reply.client.id)
                yield replace(reply, received=_shared(reply.received))

        part = self._part.server_update(subtree(_PART, state), seen(), key)
        rest = {name: leaf for name, leaf in state.items() if not name.startswith(f"{_PART}/")}
        return {**rest, **prefixed(_PART, part), _MET: torch.tensor(sorted(met), dtype=torch.int64)}

    # --- client ------------------------------------------------------------------------------------------------------

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """Train both parts end to end, return the shared one, keep the private one."""
        if self._in_phase_a(received):
            update = self._whole.client_update(self._revealed(received), {}, data, client, key)
            return replace(update, personal=personal)
        private, shared = self._private(received, personal), _shared(received)
        new = f"{_LOCAL}/{self.private[0]}" not in personal if self.private else False
        side = None
        if self.objective is not None:
            side = self.objective.side(self.task, self._tap, subtree(_AUX, personal), data, self.solver, client, key)
        task = self._task.keeping(private, side)
        if new and self.warmup_epochs and client.round > self.warmup_after:
            task.load(self._start(shared))
            solver = replace(self.solver, local_epochs=self.warmup_epochs, local_steps=None)
            fit(task, data.train, solver, round=client.round, key=key.fold_in("warmup"), private_only=True)
            task = self._task.keeping(self._own(task), side)
        method = self.method.bind(task)
        update = method.client_update(shared, subtree(_INNER, personal), data, client, key)
        kept = {**prefixed(_LOCAL, self._own(task)), **prefixed(_INNER, update.personal)}
        metrics = dict(update.metrics)
        if side is not None:
            kept |= prefixed(_AUX, side.state())
            metrics |= side.metrics(data.train)
        return replace(update, personal=kept, metrics=metrics)

    def _own(self, task: Task) -> Tree:
        state = read_state(task.module)
        return {name: state[name].detach().cpu().clone() for name in self.private}

    def _start(self, shared: Tree) -> Tree:
        """The shared leaves as the wrapped method starts from them."""
        if not self._task.spec.keys() <= shared.keys():
            raise ConfigError(f"{self.name}: {self.method.name} has no single start, which this setting needs.")
        return {name: shared[name].reshape(leaf.shape) for name, leaf in self._task.spec.items()}

    @cached_property
    def _tap(self) -> str:
        """The layer whose output is the representation: the last private one."""
        return list(_layers({name: self.task.spec[name] for name in self.private}))[-1]

    def _private(self, received: Tree, personal: Tree) -> Tree:
        own = subtree(_LOCAL, personal)
        if own or not self.private:
            return own
        sent = subtree(_LOCAL, received)
        return {name: sent[name].reshape(self.task.spec[name].shape) for name in self.private}

    def _in_phase_a(self, received: Tree) -> bool:
        if self.goal is not None:
            return bool(received[_ALL].any())
        return self.first_rounds > 0 and _FIRST not in received

    def message_spec(self, received: Tree) -> Spec:
        """What the wrapped method sends of what it sees."""
        if self._in_phase_a(received):
            return self._whole.message_spec(self._revealed(received))
        return self._part.message_spec(_shared(received))

    # --- predictors and figures --------------------------------------------------------------------------------------

    def global_model(self, server: Tree) -> Predictor:
        """The shared leaves with the private ones that a new device would start from."""
        if _MET not in server:
            return self._whole.global_model(subtree(_WHOLE, server))
        return self._with(subtree(_LOCAL, server)).global_model(subtree(_PART, server))

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """The device's own model: its private leaves, and the newest shared ones."""
        if self._in_phase_a(received):
            return self._whole.local_model(self._revealed(received), {})
        inner = subtree(_INNER, personal)
        return self._with(self._private(received, personal)).local_model(_shared(received), inner)

    def own_part(self, personal: Tree) -> Tree:
        """The private leaves."""
        return subtree(_LOCAL, personal)

    def metrics(self, server: Tree) -> Mapping[str, float]:
        """The wrapped method's, and how much is shared."""
        if _MET not in server:
            return self._whole.metrics(subtree(_WHOLE, server))
        figures = self._with(subtree(_LOCAL, server)).metrics(subtree(_PART, server))
        return {**figures, "shared_parameters": float(num_values(self._task.moving))}

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        """The wrapped method's, of what it sees: the paper does not count the copy at the beginning of phase B."""
        if self._in_phase_a(received):
            return self._whole.paper_bytes(self._revealed(received), message)
        return self._part.paper_bytes(_shared(received), message)


def paper_parameters(
    *, devices: int, fraction: float, parameters: int, rounds: int, shared: int = 0, lg_rounds: int = 0
) -> int:
    """The paper's cost in parameters: R_A (M + CM) P + R_B (M + CM) P_g. FedAvg has no R_B.

    It counts the way down for all M devices in every round, and the one upload of all private parts for the *new test*
    not at all; what is really sent is in a run's `bytes_up`, `bytes_down` and `new_test_bytes_up`.

    >>> paper_parameters(devices=100, fraction=0.1, parameters=633_226, rounds=725)  # FedAvg on MNIST: 5.05e10
    50499773500
    """
    each_round = devices + max(int(fraction * devices), 1)
    return each_round * (rounds * parameters + lg_rounds * shared)


def paper_parameters_mtl(*, devices: int, parameters: int, rounds: int) -> int:
    """The paper's cost of multi-task learning in parameters: R · 2M · P.

    >>> paper_parameters_mtl(devices=100, parameters=633_226, rounds=400)
    50658080000
    """
    return rounds * 2 * devices * parameters


@dataclass(frozen=True)
class _IfFirst:
    """The length of a private leaf on its way down."""

    size: int

    def __call__(self, exact: Tree) -> int:
        return self.size if bool(exact[_FIRST].any()) else 0


def _layers(spec: Spec) -> dict[str, list[str]]:
    """Leaves by the layer that they belong to, in the model's order."""
    layers: dict[str, list[str]] = {}
    for name in spec:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


def _shared(received: Tree) -> Tree:
    """What of a broadcast the wrapped method sees."""
    return {n: leaf for n, leaf in received.items() if n not in (_ALL, _FIRST) and not n.startswith(f"{_LOCAL}/")}


def _again(head: Reply, rest: Iterator[Reply]) -> Iterator[Reply]:
    yield head
    yield from rest
