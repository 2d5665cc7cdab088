"""Hard EM in a hierarchical model: a prior, a local solver and an M-step make a method.

The server holds the parameters w of a prior p(φ|w); a client's weights φ_s are a latent variable under it.

* E-step, on the client: φ_s ≈ argmax log p(D_s|φ) + log p(φ|w), a few optimizer steps from the prior.
* message: φ_s as a difference Δ_s from the weights that it started from.
* M-step, on the server: w = argmax Σ_s log p(φ_s|w) in closed form, or one optimizer step along its gradient.

Louizos et al., "Federated averaging as expectation maximization", 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from laconic.core import (
    ALONE,
    UNBOUND,
    Bound,
    ClientData,
    ClientInfo,
    Key,
    Population,
    Predictor,
    Reply,
    Side,
    Spec,
    Task,
    Tree,
    Update,
    one_of,
    prefixed,
    subtree,
    write_state,
)
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Pull, Solver, solve

Weighting = Literal["uniform", "examples"]
_BESIDE = "beside"  # before the leaves that a companion has on the server and in messages


class Vote(NamedTuple):
    """A client's message with the weight that it has in the M-step."""

    weight: float
    message: Tree


class Origin(NamedTuple):
    """Where a client's fit begins, and what of that choice the server must be told."""

    weights: Tree
    note: Tree


class Prior(Protocol):
    """A family of priors. `centre` is the tree of its parameters w, as the server holds and sends them."""

    def init(self, task: Task, key: Key) -> Tree:
        """The first parameters."""
        ...

    def spec(self, task: Task) -> Spec:
        """What `centre` looks like."""
        ...

    def start(self, centre: Tree, task: Task, data: ClientData, key: Key) -> Origin:
        """The weights that a client starts from."""
        ...

    def pull(self, centre: Tree, task: Task) -> Pull | None:
        """The prior's part in a client's step."""
        ...

    def message_spec(self, task: Task) -> Spec:
        """What a message looks like."""
        ...

    def shift(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """Closed-form M-step: the new parameters minus the old ones."""
        ...

    def ascent(self, centre: Tree, votes: Iterable[Vote], task: Task) -> Tree:
        """Gradient M-step: an ascent direction of Σ_s log p(φ_s|w), averaged over the votes.

        For running statistics, which have no gradient: the step that they take.
        """
        ...

    def model(self, centre: Tree, task: Task) -> Predictor:
        """What the server predicts with."""
        ...


class OneCentre:
    """What priors have in common whose parameter w is a model's weights: where all clients' weights lie around."""

    def init(self, task: Task, key: Key) -> Tree:
        """One set of weights."""
        return task.init(key)

    def spec(self, task: Task) -> Spec:
        """The model's own leaves."""
        return task.spec

    def start(self, centre: Tree, task: Task, data: ClientData, key: Key) -> Origin:
        """The centre itself."""
        return Origin(centre, {})

    def message_spec(self, task: Task) -> Spec:
        """A difference for every leaf that can move."""
        return task.moving

    def model(self, centre: Tree, task: Task) -> Predictor:
        """The model at the centre."""
        return predictor(task, centre)


class Fitted(NamedTuple):
    """A local update once the weights are fitted, as a companion sees it."""

    centre: Tree
    beside: Tree
    personal: Tree
    delta: Tree
    """φ − w, leaf by leaf."""
    steps: int
    lr: float
    data: ClientData
    client: ClientInfo
    key: Key
    side: Side | None


class Learnt(NamedTuple):
    """What a companion makes of a local update: the client's new personal state, and what is sent beside the delta."""

    personal: Tree
    message: Tree = {}  # noqa: RUF012 - never changed


def _none(task: Task) -> Tree:
    """Nothing beside the centre."""
    return {}


def zeros(task: Task) -> Tree:
    """A zero for every value that gradients change: where a companion's tree may begin."""
    return {name: torch.zeros(task.spec[name].shape) for name in task.trainable}


def _unmoved(beside: Tree, sent: Tree, shift: Tree, share: float) -> tuple[Tree, Tree]:
    """Both as they are."""
    return beside, shift


@dataclass(frozen=True, kw_only=True)
class Companion:
    """What a method of the EM family has beside its prior: functions, of which it gives those that it needs.

    Control variates are such a thing: a tree on the server beside the centre (sent along where `sends`), a personal
    state at every client, a part in every local step, and an M-step of their own.
    """

    learn: Callable[[Fitted, Task, Solver], Learnt]
    """What a client keeps after its fit, and what it sends beside the delta: a leaf for each of `init`, or nothing."""
    init: Callable[[Task], Tree] = _none
    """(task): what the server holds beside the centre."""
    sends: bool = True
    """Whether that is sent along with the centre, and answered."""
    pull: Callable[[Tree, Tree, Task], Pull | None] | None = None
    """(beside, personal, task): its part in a client's step, after the prior's."""
    side: Callable[[Tree, Tree, Task], Side | None] | None = None
    """(centre, personal, task): what a client learns along with the weights."""
    step: Callable[[Tree, Tree, Tree, float], tuple[Tree, Tree]] = _unmoved
    """(beside, sent, shift, share): the new `beside` and the new shift of the centre, from the mean of what was `sent`
    by this `share` of all clients."""
    model: Callable[[Tree, Tree, Task], Tree] | None = None
    """(centre, personal, task): the weights of a client's own model, where clients have one."""


@dataclass(frozen=True)
class EM:
    """A method of the EM family. `server = None` is the closed-form M-step."""

    prior: Prior
    solver: Solver
    server: ServerOptimizer | None = None
    weighting: Weighting = "uniform"
    companion: Companion | None = None
    task: Task = UNBOUND
    population: Population = ALONE

    link = ("float32", "float32")
    client_metrics = ("train_loss",)

    def __post_init__(self) -> None:
        one_of("weighting", self.weighting, get_args(Weighting))

    def bind(self, task: Task, population: Population = ALONE) -> Bound:
        """The method for a task."""
        em = replace(self, task=task, population=population)
        own_model = self.companion is not None and self.companion.model is not None
        own_part = dict if own_model else None
        return Bound.of(em, personal=self.companion is not None, own_model=own_model, own_part=own_part)

    def init(self, key: Key) -> Tree:
        """Server state: the prior's parameters, what a companion has beside them, later the optimizer's state."""
        return {**prefixed("w", self.prior.init(self.task, key)), **prefixed(_BESIDE, self._first_beside())}

    def _first_beside(self) -> Tree:
        return {} if self.companion is None else self.companion.init(self.task)

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """The prior's parameters, and a companion's tree where it is sent along."""
        sent = self.companion is not None and self.companion.sends
        return {**subtree("w", server), **(prefixed(_BESIDE, subtree(_BESIDE, server)) if sent else {})}

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """The same leaves in every round."""
        spec = self.prior.spec(self.task)
        if self.companion is not None and self.companion.sends:
            spec = {**spec, **{f"{_BESIDE}/{name}": self.task.spec[name] for name in self._first_beside()}}
        return spec

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """E-step: fit from the prior, under the prior."""
        task, solver, companion = self.task, self.solver, self.companion
        centre, beside = _parted(received)
        origin = self.prior.start(centre, task, data, key)
        module = task.load(origin.weights)
        pull, side = self.prior.pull(centre, task), None
        if companion is not None:
            pull = _both(pull, companion.pull and companion.pull(beside, personal, task))
            side = companion.side and companion.side(centre, personal, task)
        with task.held(side=side):
            fitted = solve(task, data.train, solver, round=client.round, key=key.fold_in("batches"), pull=pull)
        own = {name: leaf for name, leaf in task.state().items() if name in task.moving}
        delta = differences(own, origin.weights)
        learnt = Learnt(personal)
        if companion is not None:
            lr = solver.rate(round=client.round)
            seen = Fitted(centre, beside, personal, delta, fitted.steps, lr, data, client, key, side)
            learnt = companion.learn(seen, task, solver)
        return Update(
            message={**delta, **origin.note, **prefixed(_BESIDE, learnt.message)},
            personal=learnt.personal,
            fitted=module,
            metrics={"train_loss": fitted.loss},
        )

    def message_spec(self, received: Tree) -> Spec:
        """A difference for every leaf that can move, and for every leaf that a companion sends along."""
        spec = self.prior.message_spec(self.task)
        if self.companion is None or not self.companion.sends:
            return spec
        return {**spec, **{f"{_BESIDE}/{name}": self.task.spec[name] for name in self._first_beside()}}

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """M-step: fold the replies in the order given."""
        centre, count = subtree("w", server), 0

        def votes() -> Iterable[Vote]:
            nonlocal count
            for reply in replies:
                count += 1
                yield Vote(weight_of(reply, self.weighting), reply.message)

        step = self.prior.shift if self.server is None else self.prior.ascent
        shift, sent = _parted(step(centre, votes(), self.task))
        beside = subtree(_BESIDE, server)
        if self.companion is not None:
            beside, shift = self.companion.step(beside, sent, shift, count / self.population.clients)
        if self.server is None:
            new = {name: leaf + shift[name] if name in shift else leaf for name, leaf in centre.items()}
            return {**prefixed("w", new), **prefixed(_BESIDE, beside)}
        # A leaf of the centre is named like the model's, or "k/" and that.
        trainable = set(self.task.trainable)
        parameters = {name for name in centre if name in trainable or name.split("/", 1)[-1] in trainable}
        weights, state = optimizer_step(self.server, centre, shift, subtree("optimizer", server), parameters)
        return {**prefixed("w", weights), **prefixed(_BESIDE, beside), **prefixed("optimizer", state)}

    def global_model(self, server: Tree) -> Predictor:
        """The prior's own predictor."""
        return self.prior.model(subtree("w", server), self.task)

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """A client's own model, where a companion keeps one, else what the server predicts with."""
        centre = _parted(received)[0]
        if self.companion is None or self.companion.model is None:
            return self.prior.model(centre, self.task)
        return predictor(self.task, self.companion.model(centre, personal, self.task))


def _parted(tree: Tree) -> tuple[Tree, Tree]:
    """A tree of a broadcast, a message or a mean: what is the prior's, and what goes beside it."""
    beside = subtree(_BESIDE, tree)
    return ({n: leaf for n, leaf in tree.items() if not n.startswith(f"{_BESIDE}/")} if beside else tree), beside


def _both(one: Pull | None, other: Pull | None) -> Pull | None:
    """Both parts in a step, one after the other."""
    if one is None or other is None:
        return one or other
    if other.project is not None:
        raise NotImplementedError("a companion adds to gradients; projections are the prior's.")

    def gradient(weights: list[Tensor], gradients: list[Tensor]) -> None:
        for part in (one.gradient, other.gradient):
            if part is not None:
                part(weights, gradients)

    return Pull(gradient, one.project)


def weight_of(reply: Reply, weighting: Weighting) -> float:
    """How much a reply counts in an average."""
    return float(reply.client.examples) if weighting == "examples" else 1.0


def differences(own: Tree, start: Tree) -> Tree:
    """What a local update changed, leaf by leaf, ready to be sent."""
    if not own:
        return {}
    deltas = torch._foreach_sub([leaf.cpu() for leaf in own.values()], [start[name] for name in own])
    return dict(zip(own, deltas, strict=True))


def optimizer_step(
    optimizer: ServerOptimizer, weights: Tree, ascent: Tree, state: Tree, parameters: Collection[str]
) -> tuple[Tree, Tree]:
    """A gradient M-step: parameters by the optimizer; running statistics are averages and take the plain step."""
    trained = {name: direction for name, direction in ascent.items() if name in parameters}
    new, state = optimizer.step(weights, trained, state)
    new.update({name: weights[name] + d for name, d in ascent.items() if name not in trained})
    return {name: new.get(name, leaf) for name, leaf in weights.items()}, state


def weighted_mean(votes: Iterable[Vote]) -> Tree:
    """Σ_s weight_s message_s / Σ_s weight_s, folded one by one: memory does not grow with the cohort."""
    total: Tree = {}
    weight = 0.0
    for vote in votes:
        if total:
            torch._foreach_add_(list(total.values()), list(vote.message.values()), alpha=vote.weight)
        else:
            total = {name: leaf * vote.weight for name, leaf in vote.message.items()}
        weight += vote.weight
    return {name: leaf / weight for name, leaf in total.items()}


def predictor(task: Task, weights: Tree) -> Predictor:
    """A fresh model with the given weights, ready to predict."""
    module = task.fresh()
    write_state(module, task.complete(weights))
    return module.eval()
