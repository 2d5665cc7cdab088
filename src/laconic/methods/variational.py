"""The log-uniform prior: every weight is a Gaussian, and what is nothing but noise is neither sent nor kept. vardrop.

| symbol | here |
|---|---|
| w ~ N(θ, σ²), α = σ²/θ² | a weight; θ is the model's own leaf, log σ² a leaf beside it (`models.variational`) |
| M = 1[log α ≤ T] | the weights that count, `threshold` = T |
| β, c, N | warm-up from 0 (`kl_start`) to 1 (`kl_full`), `kl_scale`, examples (`kl_size`) |

A client minimises, with one draw of every output (the local reparametrisation),

    mean NLL + c β/N Σ_j KL(log α_j),

whose KL pulls small weights to 0 and their noise up. Two regimes share what stands here: synchronous SGD, where
gradients travel (`methods.synchronous`, the paper's), and federated averaging, where differences do (`Averaged`). In
both, a message is a bit per weight, M, and values where it is 1; biases, normalisation layers and running statistics
travel whole. With `share_alpha`, log σ² is learnt together and travels as θ does; without, every client has its own and
keeps it: that is half the bytes.

Du et al., "Efficient federated learning via variational dropout", 2018; Molchanov et al., 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from laconic.core import (
    ALONE,
    UNBOUND,
    Artifact,
    Bound,
    ClientData,
    ClientInfo,
    ConfigError,
    Key,
    Leaf,
    Part,
    Population,
    Predictor,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    flat,
    not_negative,
    one_of,
    prefixed,
    read_state,
    subtree,
)
from laconic.methods.em import Weighting, differences, predictor, weight_of
from laconic.methods.solvers import Pull, Solver, solve
from laconic.models.anatomy import leave_dense
from laconic.models.variational import (
    HIGHEST,
    LOWEST,
    Noise,
    kl_gradient,
    log_alpha,
    noise_of,
    pruned,
    sigma_name,
    variational,
)

MASK = "#mask/"
"""Before the name of a weight: the leaf of its bits in a message."""
_LIKELY, _UNLIKELY = 0.9, 0.01  # bits of a mask where the last one was 1 and 0; a guess costs bits, never correctness


@flat
@dataclass(frozen=True, kw_only=True)
class Posterior:
    """What a client believes of its weights, and how strongly the prior pulls.

    Leaves that match a pattern of `dense` stay ordinary; so do, with a warning, layers without a variational form.
    """

    share_alpha: bool = False
    threshold: float = 3.0
    first_log_sigma2: float = -8.0
    kl_scale: float = 1.0
    kl_size: Literal["local", "federation"] = "federation"
    kl_start: float = 0.0
    kl_full: float = 0.0
    sigma_lr: float = 10.0
    dense: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not LOWEST < self.threshold < HIGHEST:
            raise ConfigError(
                f"threshold is of log α, which is clipped to [{LOWEST:g}, {HIGHEST:g}], so it must lie between; "
                f"got {self.threshold}."
            )
        if not -20 <= self.first_log_sigma2 <= 0:
            raise ConfigError(f"first_log_sigma2 must lie in [-20, 0], got {self.first_log_sigma2}.")
        not_negative("kl_scale", self.kl_scale)
        one_of("kl_size", self.kl_size, ("local", "federation"))
        if not 0 <= self.kl_start <= self.kl_full < math.inf:
            raise ConfigError(
                "the KL's warm-up goes from kl_start to kl_full, in epochs with 0 ≤ kl_start ≤ kl_full; "
                f"got {self.kl_start} and {self.kl_full}."
            )
        if not 0 < self.sigma_lr < math.inf:
            raise ConfigError(f"sigma_lr must be finite and positive, got {self.sigma_lr}.")

    def kl_weight(self, epoch: float, examples: int) -> float:
        """c β/N after so many epochs.

        It grows from 0 at `kl_start` to its full size at `kl_full`.
        """
        if epoch < self.kl_start:
            return 0.0
        warmth = 1.0 if epoch >= self.kl_full else (epoch - self.kl_start) / (self.kl_full - self.kl_start)
        return self.kl_scale * warmth / examples

    def mask(self, theta: Tensor, log_sigma2: Tensor) -> Tensor:
        """M, as a vector."""
        return log_alpha(theta, log_sigma2).le(self.threshold).reshape(-1)


@dataclass(frozen=True, eq=False)
class Form:
    """A task's model in its variational form, and how its leaves look in a message."""

    posterior: Posterior
    plain: Task
    task: Task
    weights: tuple[str, ...]
    _specs: list[tuple[tuple[Tensor, ...], Spec]] = field(default_factory=list)
    """The last specs that were made, and of which masks: both ends of a link ask for theirs several times a round."""

    @classmethod
    def of(cls, task: Task, posterior: Posterior) -> Form:
        """Layers without a variational form are left as they are, with a warning."""
        first = posterior.first_log_sigma2
        dense = (*posterior.dense, *task.private)
        made = variational(task.fresh(), first_log_sigma2=first, dense=dense)
        leave_dense("vardrop", made.whole, instead="has no variational form for")
        changed = replace(
            task,
            build=lambda: variational(task.build(), first_log_sigma2=first, dense=dense).module,
            initialize=None,
            initial=None,
        )
        return cls(posterior, task, changed, made.weights)

    @property
    def noise(self) -> Noise:
        """What the layers of the working copy draw from."""
        return noise_of(self.task.module)

    @cached_property
    def sigmas(self) -> tuple[str, ...]:
        """The leaves of log σ², in the order of `weights`."""
        return tuple(sigma_name(weight) for weight in self.weights)

    @cached_property
    def masked(self) -> Mapping[str, str]:
        """Of every leaf that is sent in part: the weight whose mask says which part."""
        owners = {weight: weight for weight in self.weights}
        if self.posterior.share_alpha:
            owners |= dict(zip(self.sigmas, self.weights, strict=True))
        return owners

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """The leaves that are learnt together."""
        return (*self.plain.trainable, *(self.sigmas if self.posterior.share_alpha else ()))

    @cached_property
    def moving(self) -> Spec:
        """The leaves that a message speaks of."""
        spec = dict(self.plain.moving)
        if self.posterior.share_alpha:
            spec |= {sigma: self.task.spec[sigma] for sigma in self.sigmas}
        return spec

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The number of weights in every leaf that has a mask."""
        return {weight: self.plain.spec[weight].size for weight in self.weights}

    def first_sigmas(self) -> Tree:
        """Where log σ² begins."""
        first = self.posterior.first_log_sigma2
        return {
            sigma: torch.full(self.plain.spec[weight].shape, first, dtype=self.plain.spec[weight].dtype)
            for sigma, weight in zip(self.sigmas, self.weights, strict=True)
        }

    def whole_masks(self) -> Tree:
        """Every weight counts."""
        return {weight: torch.ones(size, dtype=torch.bool) for weight, size in self.sizes.items()}

    def masks(self, weights: Mapping[str, Tensor], sigmas: Mapping[str, Tensor]) -> Tree:
        """Which weights count."""
        return {
            weight: self.posterior.mask(weights[weight], sigmas[sigma])
            for weight, sigma in zip(self.weights, self.sigmas, strict=True)
        }

    def spec(self, last: Mapping[str, Tensor] | None) -> Spec:
        """A message: bits, of which `last` tells the likely ones, and as many values; all else whole."""
        masks = () if last is None else tuple(last[weight] for weight in self.weights)
        for known, spec in self._specs:
            if len(known) == len(masks) and all(a is b for a, b in zip(known, masks, strict=True)):
                return dict(spec)
        spec = {}
        for weight, size in self.sizes.items():
            expected = None if last is None else last[weight].float() * (_LIKELY - _UNLIKELY) + _UNLIKELY
            spec[MASK + weight] = Leaf((size,), torch.bool, expected=expected)
        for name, leaf in self.moving.items():
            owner = self.masked.get(name)
            spec[name] = leaf if owner is None else Leaf((leaf.size,), leaf.dtype, length=_Count(MASK + owner))
        self._specs[:] = [(masks, spec), *self._specs[:1]]
        return dict(spec)

    def packed(self, tree: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tree:
        """A tree as it is sent."""
        message: Tree = prefixed(MASK.removesuffix("/"), masks)
        for name in self.moving:
            owner = self.masked.get(name)
            message[name] = tree[name] if owner is None else taken(tree[name].reshape(-1), masks[owner])
        return message

    def support(self, message: Mapping[str, Tensor]) -> Tree:
        """The masks of a message."""
        return {weight: message[MASK + weight] for weight in self.weights}

    def sent_values(self, message: Mapping[str, Tensor]) -> int:
        """Values of a message; bits and running statistics are left out."""
        return sum(message[name].numel() for name in self.trained)

    def values_on(self, masks: Mapping[str, Tensor]) -> int:
        """Values of a message with these masks."""
        counts = {weight: int(mask.sum()) for weight, mask in masks.items()}
        return sum(
            counts[self.masked[name]] if name in self.masked else self.moving[name].size for name in self.trained
        )

    def share_sent(self, masks: Mapping[str, Tensor]) -> float:
        """Values that are sent of those that could be."""
        return self.values_on(masks) / sum(self.moving[name].size for name in self.trained)

    def sparsity(self, masks: Mapping[str, Tensor]) -> dict[str, float]:
        """The share of weights that count, of all and by layer."""
        counts = {weight: int(mask.sum()) for weight, mask in masks.items()}
        return {
            "nonzero": sum(counts.values()) / sum(self.sizes.values()),
            **{f"nonzero/{w.removesuffix('.weight')}": count / self.sizes[w] for w, count in counts.items()},
        }


@dataclass(frozen=True, eq=False)
class _Count:
    """How many values of a leaf are sent: as many as its mask has ones."""

    mask: str

    def __call__(self, exact: Tree) -> int:
        return int(exact[self.mask].sum())


def taken(values: Tensor, mask: Tensor) -> Tensor:
    """The values where a mask is 1.

    >>> taken(torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
    tensor([2.])
    """
    return values.clone() if bool(mask.all()) else values[mask]


def put(values: Tensor, mask: Tensor, fill: Tensor) -> Tensor:
    """What `taken` took, in its place; `fill` elsewhere.

    >>> put(torch.tensor([2.0]), torch.tensor([False, True]), torch.zeros(2))
    tensor([0., 2.])
    """
    return fill.masked_scatter(mask, values)


class Fold:
    """Sums over replies of masked values, and how often each weight counted."""

    def __init__(self, form: Form) -> None:
        self.form, self.weight, self.replies = form, 0.0, 0
        self.sums = {name: torch.zeros(leaf.size, dtype=leaf.dtype) for name, leaf in form.moving.items()}
        self.votes = {weight: torch.zeros(size, dtype=torch.int32) for weight, size in form.sizes.items()}

    def add(self, message: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """One reply more."""
        rows: dict[str, Tensor | None] = {}
        for name, mask in self.form.support(message).items():
            self.votes[name] += mask
            rows[name] = None if bool(mask.all()) else mask.nonzero().squeeze(1)
        for name, total in self.sums.items():
            owner = self.form.masked.get(name)
            place = None if owner is None else rows[owner]
            if place is None:
                total.add_(message[name].reshape(-1), alpha=weight)
            else:
                total.index_add_(0, place, message[name], alpha=weight)
        self.weight += weight
        self.replies += 1

    def means(self) -> Tree:
        """Σ_s weight_s value_s / Σ_s weight_s: a client that left a value out counts as 0."""
        moving = self.form.moving
        return {name: (total / self.weight).reshape(moving[name].shape) for name, total in self.sums.items()}

    def kept_by(self, share: float) -> Tree:
        """The weights that more than this share of the replies keep; 0 is the union."""
        return {name: votes > share * self.replies for name, votes in self.votes.items()}


class Drawn(NamedTuple):
    """The prior's gradient at a point."""

    weights: Tree
    sigmas: Tree


def prior_gradient(form: Form, weights: Mapping[str, Tensor], sigmas: Mapping[str, Tensor], scale: float) -> Drawn:
    """scale · ∂ΣKL by θ and by log σ²."""
    by_theta: Tree = {}
    by_sigma: Tree = {}
    for weight, sigma in zip(form.weights, form.sigmas, strict=True):
        theta, log_sigma2 = kl_gradient(weights[weight], sigmas[sigma])
        by_theta[weight], by_sigma[sigma] = theta.mul_(scale), log_sigma2.mul_(scale)
    return Drawn(by_theta, by_sigma)


class Dropout:
    """What both regimes have: the model without the weights that too few keep, which the state's `kept` tells."""

    posterior: Posterior
    task: Task

    @cached_property
    def form(self) -> Form:
        """The task's model in its variational form."""
        return Form.of(self.task, self.posterior)

    def _weights(self, server: Tree) -> Tree:
        """θ as the server has it."""
        raise NotImplementedError

    def _first(self, key: Key) -> Tree:
        """θ, and log σ² where it is learnt together."""
        return {**self.task.init(key), **(self.form.first_sigmas() if self.posterior.share_alpha else {})}

    def _sigmas(self, weights: Tree, personal: Tree) -> Tree:
        """log σ²: learnt together, or a client's own."""
        return {s: weights[s] for s in self.form.sigmas} if self.posterior.share_alpha else subtree("own", personal)

    def _pruned(self, weights: Tree, masks: Mapping[str, Tensor]) -> Tree:
        shaped = {name: mask.reshape(weights[name].shape) for name, mask in masks.items()}
        return pruned({name: weights[name] for name in self.task.spec}, shaped)

    def global_model(self, server: Tree) -> Predictor:
        """θ where enough clients keep it, 0 elsewhere."""
        return predictor(self.task, self._pruned(self._weights(server), subtree("kept", server)))

    def artifact(self, server: Tree) -> Artifact:
        """The pruned weights."""
        return Artifact("weights", self._pruned(self._weights(server), subtree("kept", server)))

    def metrics(self, server: Tree) -> Mapping[str, float]:
        """The share of weights that are not 0."""
        return self.form.sparsity(subtree("kept", server))


@dataclass(frozen=True)
class Averaged(Dropout):
    """Variational dropout with several local steps: federated averaging of sparse differences (beyond the paper).

    Down travel a bit per weight (whether any client of the last cohort kept it) and the weights that it lets through;
    up the client's own bits and the differences where they are 1. The server adds Σ_s M_s Δ_s / S and sets to 0 what
    nobody kept; such a weight may grow again from 0.
    """

    posterior: Posterior
    solver: Solver
    weighting: Weighting
    task: Task = UNBOUND
    clients: int = 1

    link = ("mask", "mask")
    client_metrics = ("train_loss", "gradients_sent")

    def __post_init__(self) -> None:
        refuse_weight_decay(self.solver)

    @property
    def keeps_sigma(self) -> bool:
        """Whether clients keep a log σ² of their own."""
        return not self.posterior.share_alpha

    def bind(self, task: Task, population: Population = ALONE) -> Bound:
        """The method for a task; layers without a variational form are refused here."""
        averaged = replace(self, task=task, clients=population.clients)
        _ = averaged.form
        return Bound.of(averaged, personal=averaged.keeps_sigma, own_model=averaged.keeps_sigma)

    def init(self, key: Key) -> Tree:
        """Weights as everyone's; all of them count."""
        return {**prefixed("w", self._first(key)), **prefixed("kept", self.form.whole_masks())}

    def init_client(self, key: Key) -> Tree:
        """A client's own log σ²."""
        return prefixed("own", self.form.first_sigmas()) if self.keeps_sigma else {}

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """The weights that count; everything that has no mask."""
        weights = subtree("w", server)
        frozen = {name: weights[name] for name in self.task.spec if name not in self.task.moving}
        return {**self.form.packed(weights, subtree("kept", server)), **frozen}

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """Vectors as long as the bits say."""
        frozen = {name: leaf for name, leaf in self.task.spec.items() if name not in self.task.moving}
        return {**self.form.spec(None), **frozen}

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """Fit θ and log σ² under the prior; send what counts then."""
        form, solver = self.form, self.solver
        start = self._unpacked(received)
        module = form.task.load({**start, **self._sigmas(start, personal)})
        form.noise.generator = key.fold_in("noise").torch(self.task.device)
        fitted = solve(
            form.task,
            data.train,
            solver,
            round=client.round,
            key=key.fold_in("batches"),
            pull=self._pull(client.round, data.train),
            rates=dict.fromkeys(form.sigmas, self.posterior.sigma_lr),
        )
        form.noise.generator = None
        own = {name: leaf.cpu() for name, leaf in read_state(module).items()}
        masks = form.masks(own, own)
        ended = {name: own[name] for name in form.moving}
        return Update(
            message=form.packed(differences(ended, start), masks),
            personal=prefixed("own", {s: own[s].clone() for s in form.sigmas}) if self.keeps_sigma else {},
            fitted=predictor(self.task, self._pruned(own, masks)),
            metrics={"train_loss": fitted.loss, "gradients_sent": form.share_sent(masks)},
        )

    def _pull(self, round: int, part: Part) -> Pull:
        """c β/N ∂ΣKL; a client takes the others to have as many examples as itself where N is the federation's."""
        form, examples = self.form, max(len(part), 1)
        size = examples * self.clients if self.posterior.kl_size == "federation" else examples
        steps = self.solver.local_steps
        passes = self.solver.local_epochs if steps is None else steps * min(self.solver.batch_size / examples, 1.0)
        scale = self.posterior.kl_weight((round - 1) * passes, size)
        place = {name: i for i, name in enumerate(form.task.trainable)}

        def gradient(weights: list[Tensor], gradients: list[Tensor]) -> None:
            own = {name: weights[i] for name, i in place.items()}
            for tree in prior_gradient(form, own, own, scale):
                for name, leaf in tree.items():
                    gradients[place[name]] += leaf

        return Pull(gradient=gradient)

    def message_spec(self, received: Tree) -> Spec:
        """Bits that are likely as the broadcast's, and as many differences."""
        return self.form.spec(self.form.support(received))

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """θ + Σ_s M_s Δ_s / S on the union of the masks, 0 elsewhere."""
        form, weights = self.form, subtree("w", server)
        fold = Fold(form)
        for reply in replies:
            fold.add(reply.message, weight_of(reply, self.weighting))
        kept = fold.kept_by(0)
        new = {**weights, **{name: weights[name] + mean for name, mean in fold.means().items()}}
        first = form.first_sigmas()
        for name, owner in form.masked.items():
            there = kept[owner].reshape(new[name].shape)
            new[name] = new[name] * there if name == owner else torch.where(there, new[name], first[name])
        return {**prefixed("w", new), **prefixed("kept", kept)}

    def _unpacked(self, received: Tree) -> Tree:
        """θ, with 0 where nothing was sent, and log σ², with its first value there."""
        first = self.form.first_sigmas()
        tree: Tree = {}
        for name in (*self.task.spec, *(self.form.sigmas if self.posterior.share_alpha else ())):
            owner = self.form.masked.get(name)
            if owner is None:
                tree[name] = received[name]
            else:
                fill = torch.zeros(self.task.spec[owner].shape, dtype=received[name].dtype) if name == owner else None
                fill = first[name] if fill is None else fill
                tree[name] = put(received[name], received[MASK + owner].reshape(fill.shape), fill)
        return tree

    def _weights(self, server: Tree) -> Tree:
        return subtree("w", server)

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """The model without the weights that this client would drop."""
        start = self._unpacked(received)
        masks = self.form.masks(start, self._sigmas(start, personal))
        return predictor(self.task, self._pruned(start, masks))

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        """Four bytes per value that is sent, both ways; bits are not counted."""
        return 4 * (self.form.sent_values(received) + self.form.sent_values(message))


def refuse_weight_decay(solver: Solver) -> None:
    """The prior is what pulls weights to 0."""
    if solver.weight_decay:
        raise ConfigError(f"vardrop: weight_decay must be 0, for the prior takes its place; got {solver.weight_decay}.")
