"""Hard EM in a hierarchical model: a prior, a local solver and an M-step make a method.

The server holds the parameters w of a prior p(φ|w); a client's weights φ_s are a latent variable under it.

* E-step, on the client: φ_s ≈ argmax log p(D_s|φ) + log p(φ|w), a few optimizer steps from the prior.
* message: φ_s as a difference Δ_s from the weights that it started from.
* M-step, on the server: w = argmax Σ_s log p(φ_s|w) in closed form, or one optimizer step along its gradient.

Louizos et al., "Federated averaging as expectation maximization", 2021.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, get_args

import torch

from laconic.core import (
    ClientData,
    ClientInfo,
    Key,
    Predictor,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    bound_task,
    num_values,
    one_of,
    prefixed,
    read_state,
    spec_of,
    subtree,
    write_state,
)
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Pull, Solver, fit

Weighting = Literal["uniform", "examples"]


class Vote(NamedTuple):
    """A client's message with the weight that it has in the M-step."""

    weight: float
    message: Tree


class Start(NamedTuple):
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

    def start(self, centre: Tree, task: Task, data: ClientData, key: Key) -> Start:
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


@dataclass(frozen=True)
class EM:
    """A method of the EM family. `server = None` is the closed-form M-step."""

    name: str
    prior: Prior
    solver: Solver = Solver()
    server: ServerOptimizer | None = None
    weighting: Weighting = "uniform"
    bound: Task | None = None

    stateful = False
    per_client = False

    def __post_init__(self) -> None:
        one_of("weighting", self.weighting, get_args(Weighting))

    @property
    def task(self) -> Task:
        """The task that `bind` gave."""
        return bound_task(self.bound, self.name)

    def bind(self, task: Task) -> EM:
        """The same method for a task."""
        return replace(self, bound=task)

    def init(self, key: Key) -> Tree:
        """Server state: the prior's parameters, later the optimizer's state beside them."""
        return prefixed("w", self.prior.init(self.task, key))

    def init_client(self, key: Key) -> Tree:
        """No personal state."""
        return {}

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """The prior's parameters."""
        return subtree("w", server)

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """What every client knows about the broadcast beforehand."""
        return self.prior.spec(self.task)

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """E-step: fit from the prior, under the prior."""
        start = self.prior.start(received, self.task, data, key)
        module = self.task.load(start.weights)
        pull = self.prior.pull(received, self.task)
        fitted = fit(self.task, data.train, self.solver, round=client.round, key=key.fold_in("batches"), pull=pull)
        own = {name: leaf for name, leaf in read_state(module).items() if name in self.task.moving}
        return Update(
            message={**differences(own, start.weights), **start.note},
            personal=personal,
            fitted=module,
            metrics={"train_loss": fitted.loss},
        )

    def message_spec(self, received: Tree) -> Spec:
        """A difference for every leaf that can move."""
        return self.prior.message_spec(self.task)

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """M-step: fold the replies in the order given."""
        centre, votes = subtree("w", server), self._votes(replies)
        if self.server is None:
            shift = self.prior.shift(centre, votes, self.task)
            return prefixed("w", {n: leaf + shift[n] if n in shift else leaf for n, leaf in centre.items()})
        ascent = self.prior.ascent(centre, votes, self.task)
        # A leaf of the centre is named like the model's, or "k/" and that.
        trainable = set(self.task.trainable)
        parameters = {name for name in centre if name in trainable or name.split("/", 1)[-1] in trainable}
        weights, state = optimizer_step(self.server, centre, ascent, subtree("optimizer", server), parameters)
        return {**prefixed("w", weights), **prefixed("optimizer", state)}

    def _votes(self, replies: Iterable[Reply]) -> Iterator[Vote]:
        for reply in replies:
            yield Vote(weight_of(reply, self.weighting), reply.message)

    def global_model(self, server: Tree) -> Predictor:
        """The prior's own predictor."""
        return self.prior.model(subtree("w", server), self.task)

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """Without personal state, what the server predicts with."""
        return self.prior.model(received, self.task)

    def metrics(self, server: Tree) -> Mapping[str, float]:
        """Nothing besides the weights."""
        return {}

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        """Four bytes per parameter, both ways."""
        return 4 * (num_values(spec_of(received)) + num_values(self.task.moving))


def weight_of(reply: Reply, weighting: Weighting) -> float:
    """How much a reply counts in an average."""
    return float(reply.client.examples) if weighting == "examples" else 1.0


def differences(own: Tree, start: Tree) -> Tree:
    """What a client's turn changed, leaf by leaf, ready to be sent."""
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
