"""Part of the model stays on the device: LG-FedAvg, and any other method with private leaves.

| symbol | here |
|---|---|
| ℓ_m | device m's private leaves: personal state, never on the wire |
| g | the global leaves: all that the wrapped method ever sees |
| a_m | weights of a local objective (a decoder, an adversary); private too |
| P, P_g | number of parameters, in all and of g |
| M, C, R | devices, fraction of them in a round, rounds |

A round: the server sends g; each sampled device trains ℓ_m and g end to end on its own data and returns g only; the
server combines the g's as the wrapped method does. The wrapped method is bound to a task whose state is g alone
(`Task.keeping`), so that its prior, its messages and its M-step know nothing of what is private.

Before that, phase A may train the whole model in the ordinary way. Phase B begins by copying that model to the devices:
a device's first local update in phase B brings the private leaves down once (counted like everything else), and from
then on they are its own.

Liang et al., "Think locally, act globally: federated learning with local and global representations", 2020.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar, get_args

import torch

from laconic.core import (
    ALONE,
    Artifact,
    Bound,
    ClientData,
    ClientInfo,
    ConfigError,
    Goal,
    Key,
    Leaf,
    Memory,
    Method,
    Phases,
    Population,
    Predictor,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    did_you_mean,
    num_values,
    one_of,
    plain,
    prefixed,
    same_leaves,
    subtree,
)
from laconic.methods.objectives import Objective
from laconic.methods.solvers import Solver, solve
from laconic.models.assemble import artifact_of, weights_of

T = TypeVar("T")
Start = Literal["server", "own"]
End = Literal["first", "last"]

_FIRST = "#first"  # of a broadcast: whether the private leaves come along
_ALL = "#all"  # of a broadcast, where a goal ends phase A: whether it is one of phase A
_LOCAL, _AUX, _INNER, _WHOLE, _PART, _MET = "local", "aux", "inner", "whole", "part", "met"


@dataclass(frozen=True)
class Depth:
    """Private leaves by where they stand: whole layers from one end of the model.

    So many `private_layers`, or all layers but `global_layers` at the other end, or as many as fit into `fraction` of
    the parameters.

    >>> spec = {"fc1.weight": Leaf((8, 4)), "fc1.bias": Leaf((8,)), "fc2.weight": Leaf((3, 8)), "fc2.bias": Leaf((3,))}
    >>> Depth(end="first", global_layers=1).chosen(spec)
    ['fc1.weight', 'fc1.bias']
    >>> Depth(end="last", fraction=0.5).chosen(spec) == Depth(end="last", private_layers=1).chosen(spec)
    True
    """

    end: End = "first"
    global_layers: int | None = None
    fraction: float | None = None
    private_layers: int | None = None

    def __post_init__(self) -> None:
        one_of("end", self.end, get_args(End))
        if (self.global_layers, self.fraction, self.private_layers).count(None) != 2:
            raise ConfigError("private leaves by depth need either global_layers or fraction or private_layers.")
        for kind, layers in (("global", self.global_layers), ("private", self.private_layers)):
            if layers is not None and layers < 0:
                raise ConfigError(f"the number of {kind} layers must not be negative, got {layers}.")
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise ConfigError(f"the private fraction must lie in [0, 1], got {self.fraction}.")

    def chosen(self, spec: Spec) -> list[str]:
        """The private leaves, in the model's order."""
        layers = _layers(spec)
        names = list(layers) if self.end == "first" else list(reversed(layers))
        if self.fraction is None:
            count = len(names) - (self.global_layers or 0) if self.private_layers is None else self.private_layers
            private = names[: max(0, count)]
        else:
            budget, private = self.fraction * num_values(spec), []
            for name in names:
                budget -= sum(spec[leaf].size for leaf in layers[name])
                if budget < 0:
                    break
                private.append(name)
        return [leaf for layer in layers if layer in private for leaf in layers[layer]]


Leaves = tuple[str, ...] | Depth
"""Which leaves are private: patterns such as `"features.*"`, or by depth."""


def KeepLocal(
    method: Method,
    leaves: Leaves,
    *,
    name: str = "",
    first: Method | None = None,
    first_rounds: int = 0,
    goal: Goal | None = None,
    start: Start = "server",
    solver: Solver | None = None,
    private_epochs: int = 0,
    joint: bool = True,
    warmup_epochs: int = 0,
    warmup_after: int | None = None,
    alone: bool = False,
    objective: Objective | None = None,
) -> Method:
    """The same method, whose clients keep some leaves of the model to themselves.

    With nothing private it is the wrapped method, bit for bit. `first` (or the method itself) trains the whole model
    for `first_rounds` rounds before, or until the server's model reaches a `goal`, whichever comes first. Devices start
    phase B from the server's model (`start = "server"`, sent once with their first local update), or from weights that
    each draws from its own key (`"own"`, which costs nothing).

    `private_epochs` train the private leaves alone at the beginning of every local update, and `joint = False` holds
    them still while the method trains the others. A device whose first local update comes after round `warmup_after`
    (that of a newcomer, unless given) trains its private leaves alone for `warmup_epochs` then. `objective` is what
    devices learn beside the task. All three need the `solver` that trains private leaves. `alone` allows that all
    leaves are private.

    >>> from laconic.methods import fedavg
    >>> from laconic.testing import small_task
    >>> lg = KeepLocal(fedavg(), ("0.*",)).bind(small_task())
    >>> list(lg.message_spec({}))
    ['3.weight', '3.bias']
    """
    one_of("start", start, get_args(Start))
    counts = {"first_rounds": first_rounds, "private_epochs": private_epochs}
    counts |= {"warmup_epochs": warmup_epochs, "warmup_after": warmup_after or 0}
    for setting, value in counts.items():
        if value < 0:
            raise ConfigError(f"{setting} must not be negative, got {value}.")
    if start == "own" and (first_rounds or goal is not None):
        raise ConfigError(
            "start = 'own' goes without rounds on the whole model: after them, devices start from that model."
        )
    if solver is None and (private_epochs or warmup_epochs or objective is not None):
        raise ConfigError("KeepLocal: private_epochs, warmup_epochs and objective need the solver of private leaves.")
    called = name or f"{method.name}+local"

    def bind(task: Task, population: Population = ALONE) -> Bound:
        if task.private and leaves != ():  # what a depth or a pattern chose of the rest would be a surprise
            raise ConfigError(
                f"{called}: some leaves are private already; give all of them to one KeepLocal, by their names."
            )
        private = _chosen(leaves, task, called, alone=alone)
        if not private and objective is not None:
            raise ConfigError(f"{called}: a local objective needs private leaves, but none is private.")
        if not private and first is None:
            return method.bind(task, population)
        after = warmup_after
        if after is None:
            after = 0 if population.newcomer is None else population.newcomer.after
        kept = _Kept(
            called=called,
            method=method,
            private=private,
            task=task,
            population=population,
            part_task=task.keeping(private),
            first=first or method,
            first_rounds=first_rounds,
            goal=goal,
            start=start,
            solver=solver,
            private_epochs=private_epochs,
            joint=joint,
            warmup_epochs=warmup_epochs,
            warmup_after=after,
            objective=objective,
        )
        return kept.bound()

    settings = {
        "method": {"name": method.name, **method.settings},
        "leaves": plain(leaves),
        "first": None if first is None else {"name": first.name, **first.settings},
        "goal": plain(goal),
        "start": start,
        "solver": plain(solver),
        **counts,
        "warmup_after": warmup_after,
        "joint": joint,
        "objective": None if objective is None else {"kind": type(objective).__name__, **plain(vars(objective))},
    }
    return Method(called, settings, bind, method.link)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """`KeepLocal` bound to a task: `part` is the wrapped method on the global leaves, `whole` phase A's on all."""

    called: str
    method: Method
    private: tuple[str, ...]
    task: Task
    population: Population
    part_task: Task
    first: Method
    first_rounds: int
    goal: Goal | None
    start: Start
    solver: Solver | None
    private_epochs: int
    joint: bool
    warmup_epochs: int
    warmup_after: int
    objective: Objective | None

    @cached_property
    def part(self) -> Bound:
        """Phase B."""
        return self.method.bind(self.part_task, self.population)

    @cached_property
    def whole(self) -> Bound:
        """Phase A."""
        return self.first.bind(self.task, self.population)

    @property
    def _has_phase_a(self) -> bool:
        return self.first_rounds > 0 or self.goal is not None

    def bound(self) -> Bound:
        """The record; what cannot keep leaves private is refused here."""
        part = self.part
        if part.replica is not None or part.phases is not None:
            raise ConfigError(
                f"{self.called}: {self.method.name} has phases or replicas of its own; wrap another method."
            )
        if part.local_model is None or self.whole.local_model is None:
            raise ConfigError(
                f"{self.called}: {self.method.name} does not say what a client predicts with (local_model)."
            )
        if self._has_phase_a and self.whole.personal:
            raise ConfigError(
                f"{self.called}: clients of {self.first.name} keep a state of their own, which the rounds on the whole "
                "model would forget; set them to 0."
            )
        if self.goal is not None:
            self._check_plain()
        return Bound.of(
            self,
            per_client=self.start == "server" or part.per_client,
            personal=bool(self.private) or part.personal,
            own_model=True,
            memory=Memory(part=self.held_part, merge=self.kept_of),
            phases=None if self.goal is None else Phases(self.aim, self.advance),
            client_metrics=self._client_metrics(),
        )

    def _client_metrics(self) -> Collection[str] | None:
        """What clients may say in either phase, if both methods say it; an objective may have a metric of its own."""
        known = (self.whole.client_metrics, self.part.client_metrics)
        return None if None in known else {"adversary_loss"}.union(*(names for names in known if names is not None))

    def _check_plain(self) -> None:
        """With a goal nobody knows the phase beforehand, so both phases send the same leaves, more or less of them."""
        whole, part = (m.broadcast_spec(ClientInfo(0, 1, 0), Key.from_seed(0)) for m in (self.whole, self.part))
        if whole != self.task.spec or part != {name: whole[name] for name in whole if name not in self.private}:
            raise ConfigError(
                f"{self.called}: a goal needs methods that send plain weights, which {self.first.name} and "
                f"{self.method.name} do not both; give the rounds on the whole model instead."
            )

    # --- server ------------------------------------------------------------------------------------------------------

    def init(self, key: Key) -> Tree:
        """Phase A's state, or phase B's at once."""
        if self._has_phase_a:
            return prefixed(_WHOLE, self.whole.init(key))
        return self._begun(self.part.init(key), self.task.init(key))

    def init_client(self, key: Key) -> Tree:
        """What the wrapped method keeps; private leaves too, where devices draw their own."""
        inner = prefixed(_INNER, self.part.init_client(key))
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
                f"{self.called}: {self.first.name} keeps no single model that devices could start from; "
                "set the rounds on the whole model to 0."
            )
        task = replace(self.part_task, initial=weights)
        return self._begun(self.method.bind(task, self.population).init(Key.from_seed(0)), weights)

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """The whole model in phase A; the global leaves in phase B, and the private ones to a device that is new."""
        state = self._at(server, client.round)
        if _MET not in state:
            whole = self.whole.broadcast(subtree(_WHOLE, state), client, key)
            return whole if self.goal is None else self._disguised(whole)
        common = self.part.broadcast(subtree(_PART, state), client, key)
        if self.start == "own":
            return common
        new = not bool((state[_MET] == client.id).any())
        start = {n: leaf.reshape(-1) if new else leaf.new_zeros(0) for n, leaf in subtree(_LOCAL, state).items()}
        phase = {} if self.goal is None else {_ALL: torch.tensor([False])}
        return {**phase, _FIRST: torch.tensor([new]), **prefixed(_LOCAL, start), **common}

    def _disguised(self, whole: Tree) -> Tree:
        """Phase A's broadcast in the form of phase B's, with a bit that says what it is."""
        private = {name: whole[name].reshape(-1) for name in self.private}
        common = {name: leaf for name, leaf in whole.items() if name not in private}
        return {_ALL: torch.tensor([True]), _FIRST: torch.tensor([True]), **prefixed(_LOCAL, private), **common}

    def _revealed(self, received: Tree) -> Tree:
        """What phase A's method sees of a broadcast."""
        if self.goal is None:
            return received
        leaves = {name: received.get(name, received.get(f"{_LOCAL}/{name}")) for name in self.task.spec}
        return {name: leaf.reshape(self.task.spec[name].shape) for name, leaf in leaves.items() if leaf is not None}

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """As long as the bit says."""
        if self.goal is None and client.round <= self.first_rounds:
            return self.whole.broadcast_spec(client, key)
        common = self.part.broadcast_spec(client, key)
        if self.start == "own":
            return common
        spec: Spec = {} if self.goal is None else {_ALL: Leaf((1,), torch.bool)}
        spec[_FIRST] = Leaf((1,), torch.bool)
        for name in self.private:
            leaf = self.task.spec[name]
            spec[f"{_LOCAL}/{name}"] = Leaf((leaf.size,), leaf.dtype, length=_IfFirst(leaf.size), exact=leaf.exact)
        return {**spec, **common}

    def held_part(self, held: Tree, spec: Spec, exact: Tree) -> Tree:
        """What a client holds, as the wrapped method sees it; phase A had private leaves under their own names."""
        if spec.keys() & set(self.private):
            return self.whole.memory.part(held, spec, exact)
        common = _global_part(spec)
        own = {f"{_LOCAL}/{name}": held[name].reshape(-1) for name in self.private if name in held}
        rest = {name: leaf for name, leaf in spec.items() if name not in common}
        return {**same_leaves({**own, **held}, rest, exact), **self.part.memory.part(held, common, exact)}

    def kept_of(self, held: Tree, received: Tree) -> Tree:
        """What a client holds afterwards; private leaves come once, and are kept as they came."""
        if received.keys() & set(self.private):
            return self.whole.memory.merge(held, received)
        common = _global_part(received)
        own = {name: leaf for name, leaf in received.items() if leaf.numel() and name not in common}
        return {**self.part.memory.merge(held, common), **own}

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """The wrapped method's M-step on what it sees; who replied has private leaves from now on."""
        stream = iter(replies)
        head = next(stream)
        state = self._at(server, head.client.round)
        if _MET not in state:
            whole = (replace(reply, received=self._revealed(reply.received)) for reply in _again(head, stream))
            return prefixed(_WHOLE, self.whole.server_update(subtree(_WHOLE, state), whole, key))
        met = set(state[_MET].tolist())

        def seen() -> Iterator[Reply]:
            for reply in _again(head, stream):
                if self.start == "server":
                    met.add(reply.client.id)
                yield replace(reply, received=_global_part(reply.received))

        part = self.part.server_update(subtree(_PART, state), seen(), key)
        rest = {name: leaf for name, leaf in state.items() if not name.startswith(f"{_PART}/")}
        return {**rest, **prefixed(_PART, part), _MET: torch.tensor(sorted(met), dtype=torch.int64)}

    def forget(self, server: Tree, client: int) -> Tree:
        """A device that lost its private leaves is sent those that a new one starts from."""
        if _MET not in server:
            return server
        part = self.part.forget(subtree(_PART, server), client)
        return {**server, **prefixed(_PART, part), _MET: server[_MET][server[_MET] != client]}

    # --- client ------------------------------------------------------------------------------------------------------

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """Train both parts end to end, return the global one, keep the private one."""
        if self._in_phase_a(received):
            update = self.whole.client_update(self._revealed(received), {}, data, client, key)
            return replace(update, personal=personal)
        common, task, solver, side = _global_part(received), self.part_task, self.solver, None
        new = f"{_LOCAL}/{self.private[0]}" not in personal if self.private else False
        if self.objective is not None and solver is not None:
            side = self.objective.side(self.task, self._tap, subtree(_AUX, personal), data, solver, client, key)
        with task.held(self._private(received, personal), side):
            epochs = self.private_epochs
            if new and client.round > self.warmup_after:
                epochs += self.warmup_epochs
            if epochs and solver is not None:
                task.load(self._start(common))
                alone = replace(solver, local_epochs=epochs, local_steps=None)
                solve(task, data.train, alone, round=client.round, key=key.fold_in("warmup"), private_only=True)
            with task.held(frozen=not self.joint):
                update = self.part.client_update(common, subtree(_INNER, personal), data, client, key)
            own = {name: task.private[name] for name in self.private}
            kept = {**prefixed(_LOCAL, own), **prefixed(_INNER, update.personal)}
        metrics = dict(update.metrics)
        if side is not None:
            kept |= prefixed(_AUX, side.state())
            metrics |= side.metrics(data.train)
        return replace(update, personal=kept, metrics=metrics)

    def _start(self, common: Tree) -> Tree:
        """The global leaves as the wrapped method starts from them."""
        spec = self.part_task.spec
        if not spec.keys() <= common.keys():
            raise ConfigError(f"{self.called}: {self.method.name} has no single start, which this setting needs.")
        return {name: common[name].reshape(leaf.shape) for name, leaf in spec.items()}

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
            return self.whole.message_spec(self._revealed(received))
        return self.part.message_spec(_global_part(received))

    # --- predictors and figures --------------------------------------------------------------------------------------

    def global_model(self, server: Tree) -> Predictor:
        """The global leaves with the private ones that a new device would start from."""
        if _MET not in server:
            return self.whole.global_model(subtree(_WHOLE, server))
        with self.part_task.held(subtree(_LOCAL, server)):
            return self.part.global_model(subtree(_PART, server))

    def artifact(self, server: Tree) -> Artifact | None:
        """That model's weights; where it has lost units, what the wrapped method makes of it."""
        if _MET not in server:
            return artifact_of(self.whole, subtree(_WHOLE, server))
        found = weights_of(self.global_model(server), self.task)
        with self.part_task.held(subtree(_LOCAL, server)):
            return found or artifact_of(self.part, subtree(_PART, server))

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """The device's own model: its private leaves, and the newest global ones."""
        if self._in_phase_a(received):
            return self.whole.local_model(self._revealed(received), {})  # type: ignore[misc]
        with self.part_task.held(self._private(received, personal)):
            return self.part.local_model(_global_part(received), subtree(_INNER, personal))  # type: ignore[misc]

    def own_part(self, personal: Tree) -> Tree:
        """The private leaves, and what else the wrapped method's clients have of a model of their own."""
        inner: Tree = {}
        if self.part.own_model:
            inner = subtree(_INNER, personal)
            inner = inner if self.part.own_part is None else self.part.own_part(inner)
        return {**prefixed(_LOCAL, subtree(_LOCAL, personal)), **prefixed(_INNER, inner)}

    def metrics(self, server: Tree) -> Mapping[str, float]:
        """The wrapped method's, and how much is global."""
        if _MET not in server:
            return self.whole.metrics(subtree(_WHOLE, server))
        with self.part_task.held(subtree(_LOCAL, server)):
            figures = self.part.metrics(subtree(_PART, server))
        return {**figures, "global_parameters": float(num_values(self.part_task.moving))}

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        """The wrapped method's, of what it sees: the paper does not count the copy at the beginning of phase B."""
        if self._in_phase_a(received):
            return self.whole.paper_bytes(self._revealed(received), message)
        return self.part.paper_bytes(_global_part(received), message)


def paper_parameters(
    *, devices: int, fraction: float, parameters: int, rounds: int, global_: int = 0, lg_rounds: int = 0
) -> int:
    """The paper's cost in parameters: R_A (M + CM) P + R_B (M + CM) P_g. FedAvg has no R_B.

    It counts the way down for all M devices in every round, and the one upload of all private parts for the *new test*
    not at all; what is really sent is in a run's `bytes_up`, `bytes_down` and `new_test_bytes_up`.

    >>> paper_parameters(devices=100, fraction=0.1, parameters=633_226, rounds=725)  # FedAvg on MNIST: 5.05e10
    50499773500
    """
    each_round = devices + max(int(fraction * devices), 1)
    return each_round * (rounds * parameters + lg_rounds * global_)


def paper_parameters_mtl(*, devices: int, parameters: int, rounds: int) -> int:
    """The paper's cost of multi-task learning in parameters: R · 2M · P.

    >>> paper_parameters_mtl(devices=100, parameters=633_226, rounds=400)
    50658080000
    """
    return rounds * 2 * devices * parameters


def _chosen(leaves: Leaves, task: Task, name: str, *, alone: bool) -> tuple[str, ...]:
    """Names of the private leaves, in the model's order."""
    spec = task.spec
    if isinstance(leaves, Depth):
        chosen = set(leaves.chosen(spec))
    else:
        chosen = set()
        for pattern in leaves:
            found = fnmatch.filter(spec, pattern)
            if not found:
                hint = did_you_mean(pattern, [*spec, *(f"{layer}.*" for layer in _layers(spec))])
                raise ConfigError(f"{name}: no leaf of the model matches {pattern!r}; {hint}")
            chosen.update(found)
    if chosen and not alone and not (task.moving.keys() - chosen):
        raise ConfigError(
            f"{name}: every leaf that is trained would be private, so that nothing is learnt together; "
            "share a layer at least, or use local_only."
        )
    return tuple(leaf for leaf in spec if leaf in chosen)


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


def _global_part(received: Mapping[str, T]) -> dict[str, T]:
    """What of a broadcast the wrapped method sees."""
    return {n: leaf for n, leaf in received.items() if n not in (_ALL, _FIRST) and not n.startswith(f"{_LOCAL}/")}


def _again(head: Reply, rest: Iterator[Reply]) -> Iterator[Reply]:
    yield head
    yield from rest
