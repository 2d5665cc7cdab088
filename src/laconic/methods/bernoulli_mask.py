"""A Bernoulli prior over masks of a frozen random network: clients learn which weights to keep, and send bits.
FedPM, and its deterministic counterpart FedMask.

| symbol | here |
|---|---|
| w | frozen random weights ± c/√fan_in, biases too, made from 8 bytes (`models.signed_constants`) |
| s, θ = σ(s) | scores, and the probability of each weight to be kept |
| m ~ Bern(θ); m ⊙ w | mask; what a model computes with |
| α, β; λ0 | the Beta posterior of θ; `lambda0`, both at the start of a window |
| R, K; n, k | rounds of a window, clients of a round; masks in the window, and how many of them keep a weight |
| ε | `shrink`: a mask counts as ε and 1 − ε in place of 0 and 1 |

A client starts at s = logit(θ) and draws a mask anew for every mini-batch. The gradient passes the draw as if it were
its mean (straight-through), ∂L/∂s = ∂L/∂m · θ(1 − θ), with a further factor θ where `ste = "theta"`. After its epochs
it sends one draw m. The server counts: α = λ0 + Σ m, β = λ0 + Σ (1 − m) over the masks of the window, and θ is the mode
of Beta(α, β),

    θ = (α − 1) / (α + β − 2) = ½ + (1 − 2ε)(2k − n) / 2(n + 2λ0 − 2),

which is ε + (1 − 2ε)·mean(m) for λ0 = 1, and never 0 or 1. After R rounds the counts begin anew. E[mean m] is the mean
of the clients' θ, with an error E‖·‖² = Σ θ(1 − θ)/K² ≤ d/4K.

FedMask draws nothing: its mask is 1[θ > ½], in training and in the message.

Isik et al., "Sparse random networks for communication-efficient federated learning", 2023. FedMask as that paper uses
it; the original (Li et al., 2021) is a personalised method and another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
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
    PayloadError,
    Population,
    Predictor,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    one_of,
    prefixed,
    subtree,
    write_state,
)
from laconic.methods.em import predictor
from laconic.methods.solvers import Latent, Solver, solve
from laconic.models.ensemble import Ensemble
from laconic.models.frozen import SCALES, FrozenScale, check_freezable, signed_constants

Ste = Literal["identity", "theta"]
Evaluate = Literal["threshold", "sample", "ensemble"]


@dataclass(frozen=True)
class ResetSchedule:
    """Counts begin anew in each of the `first` rounds, and in every `then`-th after them.

    >>> [t for t in range(20) if ResetSchedule(first=4, then=5).begins(t)]
    [0, 1, 2, 3, 4, 9, 14, 19]
    """

    first: int
    then: int

    def begins(self, rounds: int) -> bool:
        """Whether they do after so many rounds."""
        return rounds < self.first or (rounds - self.first) % self.then == 0


Reset = int | Literal["auto"] | ResetSchedule
Spread = float | Literal["uniform"]
MASK_SOLVER = Solver(optimizer="adam", lr=0.1, local_epochs=3, batch_size=128)
"""Adam on the scores, as the paper's code has it."""

_SEED, _TOTAL = "#seed", "#total"  # leaves of a broadcast that are no parameter's
_OWN, _MEMORY = "own", "memory"  # what a client keeps: its last mask, and its optimizer's state


class Release(NamedTuple):
    """What stands between probabilities and the masks that leave a device, where it is more than a draw."""

    randomize: Callable[[Tensor, Key], Tensor]
    """(theta, key): the probabilities that the one mask is drawn from."""
    corrected: Callable[[Tensor], Tensor]
    """(means): θ for means of such masks."""


@dataclass(frozen=True)
class BernoulliMask:
    """A mask of a frozen random network is learnt, and one bit per parameter sent (Isik et al., 2023).

    Down travel eight bytes of seed, the number of masks in the window, and for every parameter the number of those that
    keep it; up travels a bit for every parameter, of which both ends expect θ. The first scores come from the seed as
    well (see `first_thetas`), so that the first broadcast costs next to nothing. Each client counts once. Where every
    weight is kept with a probability near ½, a deep and narrow network passes on little but the noise of its masks:
    `spread` widens the first scores, so that most weights begin nearly decided; "uniform" is θ ~ U(0, 1).

    `reset` is R; `"auto"` takes it from the share of clients in a round (see `window_for`); a `ResetSchedule` begins
    with windows of one round. The server predicts with 1[θ > `threshold`], a coin of the seed's where θ is just that,
    with one `sample`, or with the mean of `samples` of them (`"ensemble"`); draws are a function
    of the seed and of θ. A client predicts with 1[σ(s) > `threshold`] of its own scores. With `persist_optimizer` each
    client keeps the optimizer's moments from one of its rounds to the next, as the authors' code does.

    With a `release` (see `private_masks`) the mask that is sent is drawn from other probabilities, θ is what the mean
    of such masks leads back to, and the client's own model comes from what was released too; `shrink` gives way to it.

    The weights that a model begins with are not used.
    """

    task: Task = UNBOUND
    name: str = "fedpm"
    stochastic: bool = True
    """Whether masks are drawn, in training and for the message."""
    window: int = 1
    """R where `reset` is "auto"."""
    release: Release | None = None
    _: KW_ONLY
    lambda0: float
    reset: Reset
    ste: Ste
    persist_optimizer: bool
    scale: FrozenScale
    shrink: float
    evaluate: Evaluate
    threshold: float
    samples: int
    spread: Spread
    solver: Solver

    link: ClassVar = ("mask", "mask")
    client_metrics: ClassVar = ("train_loss", "ones", "mask_entropy", "mask_cross_entropy")

    def __post_init__(self) -> None:
        if not 1 <= self.lambda0 < math.inf:
            raise ConfigError(f"lambda0 must be finite and at least 1, or θ could leave [0, 1]; got {self.lambda0}.")
        if not 0 < self.shrink < 0.5:
            raise ConfigError(f"shrink must lie in (0, 0.5), or scores could be infinite; got {self.shrink}.")
        if not 0 < self.threshold < 1:
            raise ConfigError(f"threshold must lie in (0, 1), got {self.threshold}.")
        if self.reset != "auto" and (isinstance(self.reset, str) or self.schedule.then < 1 or self.schedule.first < 0):
            raise ConfigError(
                f"reset must be 'auto', a number of rounds, at least 1, or a schedule of such; got {self.reset!r}."
            )
        if self.spread != "uniform" and (isinstance(self.spread, str) or not 0 < self.spread <= 10):
            raise ConfigError(f"spread must be 'uniform' or lie in (0, 10], got {self.spread!r}.")
        if self.samples < 1:
            raise ConfigError(f"samples must be at least 1, got {self.samples}.")
        one_of("ste", self.ste, get_args(Ste))
        one_of("scale", self.scale, tuple(SCALES))
        one_of("evaluate", self.evaluate, get_args(Evaluate))

    def bind(self, task: Task, population: Population = ALONE) -> Bound:
        """The method for a task; a model with other layers than convolutions and linear ones is refused here."""
        check_freezable(task.fresh(), self.name, private=task.private)
        mask = replace(self, task=task, window=window_for(population.cohort / population.clients))
        return Bound.of(mask, personal=self.persist_optimizer, own_model=self.persist_optimizer)

    @property
    def schedule(self) -> ResetSchedule:
        """When the counts begin anew; with R they do after R rounds, 2R, and so on."""
        if isinstance(self.reset, ResetSchedule):
            return self.reset
        return ResetSchedule(0, self.window if self.reset == "auto" else self.reset)

    @cached_property
    def layout(self) -> Layout:
        """All parameters of the task's model in one vector."""
        return Layout({name: leaf.shape for name, leaf in self.task.spec.items()})

    # --- server ------------------------------------------------------------------------------------------------------

    def init(self, key: Key) -> Tree:
        """Eight bytes, and no mask yet."""
        seed = key.fold_in("frozen").seed()
        return {
            "seed": torch.tensor([seed - (seed >> 63 << 64)], dtype=torch.int64),
            "total": torch.zeros(1, dtype=torch.int64),
            "rounds": torch.zeros(1, dtype=torch.int64),
            **prefixed("ones", self.layout.zeros(torch.int32)),
        }

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """The counts of the window."""
        return self._received(server)

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """A count for every parameter."""
        one = Leaf((1,), torch.int64)
        return {_SEED: one, _TOTAL: one, **self.layout.spec(torch.int32)}

    def theta(self, received: Tree) -> Tensor:
        """θ of every parameter, as a vector: from integers by basic operations, so that it is the same everywhere."""
        total = int(received[_TOTAL])
        if total == 0:
            return first_thetas(int(received[_SEED]), self.layout, spread=self.spread).clamp_(
                self.shrink, 1 - self.shrink
            )
        ones = self.layout.vector(received)
        if total < 0 or int(ones.min()) < 0 or int(ones.max()) > total:
            raise PayloadError("counts", f"a parameter is kept in {int(ones.max())} of {total} masks, which cannot be")
        if self.release is not None:
            levels = (torch.arange(total + 1, dtype=torch.float64) + self.lambda0 - 1) / (total + 2 * self.lambda0 - 2)
            return self.release.corrected(levels).float()[ones.long()]
        weight = (1 - 2 * self.shrink) / (2 * (total + 2 * self.lambda0 - 2))
        return ones.double().mul_(2).sub_(total).mul_(weight).add_(0.5).float()

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """Count the masks; those of the window before are forgotten when it is full."""
        over = self.schedule.begins(int(server["rounds"]))
        ones = {n: torch.zeros_like(leaf) if over else leaf.clone() for n, leaf in subtree("ones", server).items()}
        total = 0 if over else int(server["total"])
        for reply in replies:
            for name, leaf in ones.items():
                leaf.add_(reply.message[name])
            total += 1
        return {
            "seed": server["seed"],
            "total": torch.tensor([total], dtype=torch.int64),
            "rounds": server["rounds"] + 1,
            **prefixed("ones", ones),
        }

    # --- client ------------------------------------------------------------------------------------------------------

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """Learn the scores; the mask that is sent is drawn from them."""
        prior, frozen = self.theta(received), self._frozen(received[_SEED])
        module = self.task.load(self.layout.tree(frozen))
        scores = Scores(self, prior, frozen, key)
        memory = subtree(_MEMORY, personal) if self.persist_optimizer else None
        batches, latent = key.fold_in("batches"), scores.latent
        fitted = solve(
            self.task, data.train, self.solver, round=client.round, key=batches, latent=latent, memory=memory
        )
        theta = torch.sigmoid(scores.scores).cpu()
        if self.release is not None:
            theta = self.release.randomize(theta, key.fold_in("privacy")).to(theta.dtype)
        own = theta > self.threshold
        write_state(module, self.task.complete(self.layout.tree(kept(frozen, own))))
        if self.release is not None:
            theta = torch.rand(len(theta), generator=key.fold_in("mask").torch()) < theta
        elif not self.stochastic:
            theta = theta > 0.5
        sure = theta.double()
        share = float(sure.mean())
        surprise = -(sure * prior.log2() + (1 - sure) * (1 - prior).log2()).mean()
        return Update(
            message=self.layout.tree(theta),
            personal=personal if memory is None else {_OWN: own, **prefixed(_MEMORY, memory)},
            fitted=module,
            metrics={
                "train_loss": fitted.loss,
                "ones": share,
                "mask_entropy": binary_entropy(share),
                "mask_cross_entropy": float(surprise),
            },
        )

    def message_spec(self, received: Tree) -> Spec:
        """A bit for every parameter, 1 with probability θ as far as both ends know.

        A client gives its own θ and leaves the draw to the codec, but for one that privacy accounts for.
        """
        expected, bernoulli = self.layout.tree(self.theta(received)), self.stochastic and self.release is None
        return {
            n: replace(leaf, expected=expected[n], bernoulli=bernoulli)
            for n, leaf in self.layout.spec(torch.bool).items()
        }

    # --- predictors and figures --------------------------------------------------------------------------------------

    def masks(self, server: Tree) -> list[Tensor]:
        """The masks that the server predicts with, as vectors: one, or those of the ensemble."""
        theta = self.theta(self._received(server))
        if self.evaluate == "threshold":
            return [self.decided(theta, server["seed"])]
        return [self.sampled(server, number) for number in range(self.samples if self.evaluate == "ensemble" else 1)]

    def decided(self, theta: Tensor, seed: Tensor) -> Tensor:
        """1[θ > `threshold`]; of an even number of masks just half may keep a weight, and then the seed decides."""
        coin = _key(int(seed)).fold_in("ties").raw(-(-len(theta) // 8))
        heads = torch.from_numpy(np.unpackbits(coin, count=len(theta), bitorder="little")).bool()
        return (theta > self.threshold) | ((theta == self.threshold) & heads)

    def sampled(self, server: Tree, number: int) -> Tensor:
        """The draw of this number from the server's θ; the same everywhere."""
        theta = self.theta(self._received(server)).double().mul_(2.0**32).numpy()
        key = _key(int(server["seed"])).fold_in("sample", number)
        return torch.from_numpy(key.raw(4 * len(theta)).view("<u4")[: len(theta)] < theta)

    def global_model(self, server: Tree) -> Predictor:
        """The frozen weights under the server's mask or masks."""
        frozen = self._frozen(server["seed"])
        members = [predictor(self.task, self.layout.tree(kept(frozen, mask))) for mask in self.masks(server)]
        if self.evaluate != "ensemble":
            return members[0]
        return Ensemble(list(members), probabilities=self.task.outputs == "logits").eval()

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """The client's last mask where it kept one, else that of the newest θ."""
        mask = personal[_OWN] if _OWN in personal else self.decided(self.theta(received), received[_SEED])
        return predictor(self.task, self.layout.tree(kept(self._frozen(received[_SEED]), mask)))

    def artifact(self, server: Tree) -> Artifact:
        """Seed and mask; of an ensemble, seed and masks."""
        masks, settings = self.masks(server), {"seed": int(server["seed"]) % 2**64, "scale": self.scale}
        if self.evaluate != "ensemble":
            return Artifact("mask", self.layout.tree(masks[0]), settings)
        members = [prefixed(str(i), self.layout.tree(mask)) for i, mask in enumerate(masks)]
        tree = {name: leaf for member in members for name, leaf in member.items()}
        return Artifact("masks", tree, {**settings, "members": len(masks), "outputs": self.task.outputs})

    def metrics(self, server: Tree) -> Mapping[str, float]:
        """Share of weights that the model keeps (by leaf, too), bits per parameter of its masks, mean entropy of θ."""
        theta = self.theta(self._received(server)).double()
        undecided = -(theta * theta.log2() + (1 - theta) * (1 - theta).log2()).mean()
        masks = self.masks(server)
        shares = [float(mask.double().mean()) for mask in masks]
        leaves = self.layout.tree(torch.stack(masks).double().mean(dim=0))
        return {
            "kept": sum(shares) / len(shares),
            **{f"kept/{name.removesuffix('.weight')}": float(leaf.mean()) for name, leaf in leaves.items()},
            "model_bits_per_parameter": sum(map(binary_entropy, shares)),
            "mean_entropy": float(undecided),
        }

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        """The way up only: d·H2(f) + log2 d bits for a mask with a share f of ones."""
        size = self.layout.size
        ones = sum(int(leaf.sum()) for leaf in message.values())
        return math.ceil((size * binary_entropy(ones / size) + math.log2(size)) / 8)

    def _received(self, server: Tree) -> Tree:
        return {_SEED: server["seed"], _TOTAL: server["total"], **subtree("ones", server)}

    def _frozen(self, seed: Tensor) -> Tensor:
        module, private = self.task.module, self.task.private
        return self.layout.vector(signed_constants(module, int(seed), self.scale, private=private))


class Scores:
    """A client's scores while it fits: the mask of a mini-batch, and the gradient that passes it."""

    def __init__(self, method: BernoulliMask, theta: Tensor, frozen: Tensor, key: Key) -> None:
        device = method.task.device
        self._method = method
        self._frozen = frozen.to(device)
        self._random = key.fold_in("draws").torch(device)
        self.scores = torch.logit(theta.to(device))

    @property
    def latent(self) -> Latent:
        """Their part in every mini-batch: the solver moves them, and no weights."""
        return Latent(draw=self._draw, learn=self._learn, trained=[self.scores])

    def _draw(self, trained: list[Tensor]) -> tuple[Tree, list[Tensor]]:
        (scores,) = trained
        self._theta = torch.sigmoid(scores)
        if self._method.stochastic:
            mask = torch.rand(len(scores), generator=self._random, device=scores.device) < self._theta
        else:
            mask = scores > 0
        masked = (self._frozen * mask).requires_grad_()
        return self._method.layout.tree(masked), [masked]

    def _learn(self, trained: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """∂L/∂s = ∂L/∂m · θ(1 − θ), where ∂L/∂m = ∂L/∂(m ⊙ w) ⊙ w."""
        slope = gradients[0] * self._frozen
        slope.mul_(self._theta).mul_(1 - self._theta)
        return [slope.mul_(self._theta) if self._method.ste == "theta" else slope]


class Layout:
    """Leaves as parts of one vector, in order."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self.size = sum(self.sizes.values())

    def vector(self, tree: Mapping[str, Tensor]) -> Tensor:
        """The leaves, one after the other."""
        return torch.cat([tree[name].reshape(-1) for name in self.shapes])

    def tree(self, vector: Tensor) -> Tree:
        """The leaves as views of a vector."""
        parts = torch.split(vector, list(self.sizes.values()))
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def zeros(self, dtype: torch.dtype) -> Tree:
        """Zeros of a type."""
        return {name: torch.zeros(shape, dtype=dtype) for name, shape in self.shapes.items()}

    def spec(self, dtype: torch.dtype) -> Spec:
        """What such leaves look like."""
        return {name: Leaf(shape, dtype) for name, shape in self.shapes.items()}


def first_thetas(seed: int, layout: Layout, *, spread: Spread = 1.0) -> Tensor:
    """θ ~ U(0, 1), or θ = σ(s), s ~ N(0, spread²), before any mask has come: the same bits on every machine.

    Each parameter takes one raw byte of its leaf's Philox words, k, and the k-th of 256 equally likely values:
    (k + ½)/256, or σ of the normal quantile there, rounded to a multiple of 2⁻¹⁶. (So |s| is 2.89 · spread at most.)
    """
    key = _key(seed).fold_in("scores")
    bytes_ = [key.fold_in(name).raw(size)[:size] for name, size in layout.sizes.items()]
    return torch.from_numpy(np.take(_quantile_thetas(spread), np.concatenate(bytes_)))


def window_for(ratio: float) -> int:
    """R for a share of clients in each round: the paper's 1, 3 and 10 for shares of 1, ½ and 1/10.

    In between it is linear in 1/share, rounded; below a tenth it stays 10.

    >>> [window_for(ratio) for ratio in (1.0, 0.7, 0.5, 0.2, 0.1, 0.001)]
    [1, 2, 3, 6, 10, 10]
    """
    rounds = 1 / ratio
    return round(1 + 2 * (rounds - 1) if rounds <= 2 else min(3 + 7 / 8 * (rounds - 2), 10))


def binary_entropy(share: float) -> float:
    """H2 in bits.

    >>> binary_entropy(0.5), binary_entropy(1.0)
    (1.0, 0.0)
    """
    return sum(p * math.log2(1 / p) for p in (share, 1 - share) if p > 0)


def kept(frozen: Tensor, mask: Tensor) -> Tensor:
    """The weights that a mask keeps; the others are 0."""
    return torch.where(mask, frozen, 0.0)


def _key(seed: int) -> Key:
    return Key.from_seed(seed % 2**64)


@lru_cache
def _quantile_thetas(spread: Spread) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    if spread == "uniform":
        return (np.arange(256, dtype=np.float32) + np.float32(0.5)) / np.float32(256)
    scores = [spread * NormalDist().inv_cdf((k + 0.5) / 256) for k in range(256)]
    return np.array([round(2**16 / (1 + math.exp(-s))) / 2**16 for s in scores], np.float32)
