"""Every published method in a few lines. A newcomer looks here first.

Each function's keyword-only parameters are what `[method]` in a configuration may set; `solver` lends its fields, in
Python too: `fedavg(lr=0.1)` is `fedavg(solver=Solver(lr=0.1))`. Defaults stand here and nowhere else.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Protocol

from laconic.core import Bind, ConfigError, Goal, Method, Registry, gathered, plain_settings
from laconic.methods.apfl import blends
from laconic.methods.bernoulli_mask import MASK_SOLVER, BernoulliMask, Evaluate, Reset, Spread, Ste
from laconic.methods.ditto import own_models
from laconic.methods.em import EM, Weighting
from laconic.methods.feddyn import linear_terms
from laconic.methods.gaussian import Gaussian
from laconic.methods.laplace import Laplace
from laconic.methods.local_global import Depth, End, KeepLocal, Start
from laconic.methods.mixture import Mixture
from laconic.methods.multitask import MultiTask
from laconic.methods.objectives import Kind, Opponent, objective_of
from laconic.methods.private_masks import private_masks
from laconic.methods.robust import Robust, RobustEM, Rule
from laconic.methods.scaffold import control_variates
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Solver
from laconic.methods.spike_slab import Sparsity, SpikeSlab
from laconic.methods.submodel import SubModel
from laconic.methods.synchronous import Synchronous
from laconic.methods.variational import Averaged, Posterior
from laconic.models.frozen import FrozenScale
from laconic.privacy import MaskPrivacy


class Definition(Protocol):
    """What a recipe of the catalogue gives."""

    @property
    def bind(self) -> Bind:
        """How it is bound to a run."""
        ...

    @property
    def link(self) -> tuple[str, str]:
        """The codecs that its messages are made for."""
        ...


def published(recipe: Callable[..., Definition], name: str = "") -> Callable[..., Method]:
    """A method of the recipe's name (a function's, or a class's with that name), with its arguments as settings.

    >>> fedprox(mu=0.1, lr=0.05).settings["mu"], fedprox(lr=0.05).settings["lr"]
    (0.1, 0.05)
    """
    called = name or recipe.__name__

    @functools.wraps(recipe, assigned=("__doc__", "__module__", "__annotations__"), updated=())
    def build(**given: Any) -> Method:
        arguments = gathered(build, given)
        made = recipe(**arguments)
        return Method(called, plain_settings(build, arguments), made.bind, made.link)

    build.__name__ = build.__qualname__ = called
    # A class has fields besides that are no settings.
    takes = inspect.signature(recipe)
    settings = [p for p in takes.parameters.values() if p.kind is p.KEYWORD_ONLY]
    vars(build)["__signature__"] = takes.replace(parameters=settings, return_annotation=Method)
    return build


@published
def fedavg(*, weighting: Weighting = "uniform", solver: Solver = Solver()) -> Definition:
    """Federated averaging (McMahan et al., 2017): the mean of the clients' weights."""
    return EM(Gaussian(), solver, weighting=weighting)


@published
def fedprox(*, mu: float = 0.01, weighting: Weighting = "uniform", solver: Solver = Solver()) -> Definition:
    """FedAvg with a Gaussian prior of precision `mu` around the server's weights (Li et al., 2020)."""
    return EM(Gaussian(mu), solver, weighting=weighting)


@published
def fedopt(
    *,
    server: ServerOptimizer = ServerOptimizer("adam", lr=0.01),
    mu: float = 0.0,
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> Definition:
    """Any torch optimizer on the mean difference (Reddi et al., 2021): FedAdam, FedAdagrad, server momentum …"""
    return EM(Gaussian(mu), solver, server, weighting)


@published
def scaffold(*, strength: float = 1.0, weighting: Weighting = "uniform", solver: Solver = Solver()) -> Definition:
    """Control variates take the drift out of local steps; 0 `strength` is FedAvg (Karimireddy et al., 2020)."""
    return EM(Gaussian(), solver, weighting=weighting, companion=control_variates(strength, solver))


@published
def feddyn(*, alpha: float = 0.1, weighting: Weighting = "uniform", solver: Solver = Solver()) -> Definition:
    """Clients' losses get linear terms that give all of them the same minimum (Acar et al., 2021)."""
    companion = linear_terms(alpha)
    return EM(Gaussian(alpha), solver, weighting=weighting, companion=companion)


@published
def fedmedian(
    *,
    penalty: float = 1e-4,
    server: ServerOptimizer | None = None,
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> Definition:
    """A Laplace prior: soft-thresholded clients, coordinate-wise median on the server (Louizos et al., 2021)."""
    if weighting == "examples":
        warnings.warn(
            "fedmedian with weighting = 'examples' takes the clients' word for how much they count: one that claims "
            "more than half of the examples is the median; leave it 'uniform' where replies may be wrong.",
            RuntimeWarning,
            stacklevel=3,
        )
    return EM(Laplace(penalty), solver, server, weighting)


@published
def fedensemble(
    *,
    members: int = 3,
    precision: float = 0.1,
    normalized: bool = False,
    start_from: Literal["random", "best"] = "random",
    server: ServerOptimizer | None = None,
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> Definition:
    """A mixture of Gaussians: the server learns an ensemble of `members` models (Louizos et al., 2021)."""
    return EM(Mixture(members, precision, normalized, start_from), solver, server, weighting)


@published
def fedrobust(
    *,
    rule: Rule = "trimmed_mean",
    attackers: int = 1,
    best: int = 1,
    radius: float | None = None,
    iterations: int = 3,
    mu: float = 0.0,
    server: ServerOptimizer | None = None,
    solver: Solver = Solver(),
) -> Definition:
    """FedAvg with a robust mean that stands so many `attackers` in a round: trimmed, (Multi-)Krum, centred clipping."""
    prior = Robust(rule=rule, attackers=attackers, best=best, radius=radius, iterations=iterations, precision=mu)
    return RobustEM(prior, solver, server)


fedsparse = published(SpikeSlab, "fedsparse")
feddrop = published(SubModel, "feddrop")
mtl = published(MultiTask, "mtl")


@published
def fedpm(
    *,
    lambda0: float = 1.0,
    reset: Reset = "auto",
    ste: Ste = "identity",
    persist_optimizer: bool = False,
    scale: FrozenScale = "kaiming",
    shrink: float = 0.01,
    evaluate: Evaluate = "threshold",
    threshold: float = 0.5,
    samples: int = 5,
    privacy: MaskPrivacy | None = None,
    spread: Spread = 1.0,
    solver: Solver = MASK_SOLVER,
) -> Definition:
    """A mask of a frozen random network is learnt, and one bit per parameter sent (Isik et al., 2023).

    Settings are those of `BernoulliMask`; with `privacy`, masks leave as `private_masks` has it.
    """
    masks = BernoulliMask(
        name="fedpm",
        stochastic=True,
        lambda0=lambda0,
        reset=reset,
        ste=ste,
        persist_optimizer=persist_optimizer,
        scale=scale,
        shrink=shrink,
        evaluate=evaluate,
        threshold=threshold,
        samples=samples,
        spread=spread,
        solver=solver,
    )
    return masks if privacy is None else private_masks(masks, privacy)


@published
def fedmask(
    *,
    persist_optimizer: bool = False,
    scale: FrozenScale = "kaiming",
    shrink: float = 0.01,
    threshold: float = 0.5,
    solver: Solver = MASK_SOLVER,
) -> Definition:
    """FedPM without chance: masks are what is more likely than not (Li et al., 2021, as the FedPM paper has it)."""
    return BernoulliMask(
        name="fedmask",
        stochastic=False,
        lambda0=1.0,
        reset=1,
        ste="identity",
        persist_optimizer=persist_optimizer,
        scale=scale,
        shrink=shrink,
        evaluate="threshold",
        threshold=threshold,
        samples=1,
        spread=1.0,
        solver=solver,
    )


@published
def vardrop(
    *,
    posterior: Posterior = Posterior(),
    decay_rounds: int | None = None,
    ghost_updates: bool = False,
    vote: float | None = None,
    check_every: int = 100,
    weighting: Weighting = "uniform",
    solver: Solver = Solver(optimizer="adam", lr=2e-3, local_steps=1, batch_size=128),
) -> Definition:
    """Variational dropout: sparse gradients and a sparse model at once (Du et al., 2018).

    With `local_steps = 1` a round is one iteration of synchronous SGD, as published; with more, clients send sparse
    differences and may sit rounds out.
    """
    if solver.local_steps != 1:
        if decay_rounds is not None or ghost_updates or vote is not None:
            raise ConfigError("decay_rounds, ghost_updates and vote are for vardrop with local_steps = 1.")
        return Averaged(posterior, solver, weighting)
    if weighting != "uniform":
        raise ConfigError("vardrop with local_steps = 1 averages gradients of equal batches: weighting is 'uniform'.")
    vote = 0.5 if vote is None else vote
    return Synchronous(posterior, solver, decay_rounds, ghost_updates, vote, check_every)


def _all_but(layers: int, end: End) -> Depth:
    """Private are all but so many layers at this end."""
    return Depth("first" if end == "last" else "last", global_layers=layers)


@published
def lg_fedavg(
    *,
    global_layers: int = 1,
    global_part: End = "last",
    private: tuple[str, ...] | None = None,
    fedavg_rounds: int = 0,
    goal: float | None = None,
    goal_on: Literal["validation", "test"] = "validation",
    start: Start = "server",
    lg_lr: float | None = None,
    mu: float = 0.0,
    warmup_epochs: int = 0,
    warmup_after: int | None = None,
    objective: Kind = "supervised",
    objective_weight: float | None = None,
    permutations: int = 24,
    adversary: Opponent = Opponent(),
    weighting: Weighting = "examples",
    solver: Solver = Solver(),
) -> Definition:
    """LG-FedAvg: private layers on the devices, a small global model among them (Liang et al., 2020).

    The `global_layers` layers at the `global_part` end are shared; or all but the leaves that match `private`.
    `fedavg_rounds` of FedAvg on the whole model come first (phase A), or as many as reach the accuracy `goal` at an
    evaluation, or whichever ends sooner; `lg_lr` is the learning rate after them.
    """
    slower = replace(solver, lr=lg_lr or solver.lr)
    return KeepLocal(
        fedprox(mu=mu, weighting=weighting, solver=slower),
        _all_but(global_layers, global_part) if private is None else private,
        name="lg_fedavg",
        first=None if lg_lr is None else fedprox(mu=mu, weighting=weighting, solver=solver),
        first_rounds=fedavg_rounds,
        goal=None if goal is None else Goal(goal, goal_on),
        start=start,
        solver=slower,
        warmup_epochs=warmup_epochs,
        warmup_after=warmup_after,
        objective=objective_of(objective, weight=objective_weight, permutations=permutations, opponent=adversary),
    )


@published
def lg_fedsparse(
    *,
    global_layers: int = 1,
    global_part: End = "first",
    private: tuple[str, ...] | None = None,
    fedavg_rounds: int = 0,
    fedavg_lr: float | None = None,
    start: Start = "server",
    sparsity: Sparsity = "mid",
    lambda0: float | None = None,
    threshold_lr: float = 1e-3,
    server: ServerOptimizer | None = ServerOptimizer("adam", lr=0.01),
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> Definition:
    """FedSparse on the layers that are shared, the others private: gates close units of the global part only.

    `fedavg_rounds` of FedAvg on the whole model come first, with the learning rate `fedavg_lr` (the solver's).
    """
    if fedavg_lr is not None and not fedavg_rounds:
        raise ConfigError("lg_fedsparse: fedavg_lr is the learning rate of fedavg_rounds, of which there are none.")
    first_solver = solver if fedavg_lr is None else replace(solver, lr=fedavg_lr)
    first = fedavg(weighting=weighting, solver=first_solver)
    method = fedsparse(
        sparsity=sparsity,
        lambda0=lambda0,
        threshold_lr=threshold_lr,
        server=server,
        weighting=weighting,
        solver=solver,
    )
    return KeepLocal(
        method,
        _all_but(global_layers, global_part) if private is None else private,
        name="lg_fedsparse",
        first=first if fedavg_rounds else None,
        first_rounds=fedavg_rounds,
        start=start,
    )


@published
def local_only(*, start: Start = "own", solver: Solver = Solver()) -> Definition:
    """Every device by itself: no leaf is shared, nothing but empty messages travels."""
    return KeepLocal(fedavg(solver=solver), ("*",), name="local_only", start=start, alone=True)


@published
def fedper(
    *, private_layers: int = 1, start: Start = "server", weighting: Weighting = "uniform", solver: Solver = Solver()
) -> Definition:
    """The last layers are private, the others FedAvg's; all are trained together (Arivazhagan et al., 2019)."""
    inner = fedavg(weighting=weighting, solver=solver)
    return KeepLocal(inner, Depth("last", private_layers=private_layers), name="fedper", start=start)


@published
def fedrep(
    *,
    private_layers: int = 1,
    head_epochs: int = 5,
    start: Start = "server",
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> Definition:
    """The last layers are private and fitted first, for `head_epochs`; then the others (Collins et al., 2021)."""
    inner, leaves = fedavg(weighting=weighting, solver=solver), Depth("last", private_layers=private_layers)
    return KeepLocal(inner, leaves, name="fedrep", start=start, solver=solver, private_epochs=head_epochs, joint=False)


@published
def fedbabu(*, private_layers: int = 1, weighting: Weighting = "uniform", solver: Solver = Solver()) -> Definition:
    """The last layers stay as they were drawn, FedAvg learns the others; fine-tune it then (Oh et al., 2022)."""
    inner = fedavg(weighting=weighting, solver=solver)
    return KeepLocal(inner, Depth("last", private_layers=private_layers), name="fedbabu", joint=False)


@published
def ditto(*, lambda_: float = 0.1, weighting: Weighting = "uniform", solver: Solver = Solver()) -> Definition:
    """FedAvg, and a model for every client that is pulled to it; 0 is each by itself (Li et al., 2021)."""
    return EM(Gaussian(), solver, weighting=weighting, companion=own_models(lambda_))


@published
def apfl(
    *, alpha: float = 0.5, adaptive: bool = True, weighting: Weighting = "uniform", solver: Solver = Solver()
) -> Definition:
    """FedAvg, and a mixture of it with own weights for every client, whose shares it learns (Deng et al., 2020)."""
    return EM(Gaussian(), solver, weighting=weighting, companion=blends(alpha, adaptive, solver))


_RECIPES: list[Callable[..., Method]] = [fedavg, fedprox, fedopt, fedmedian, fedrobust, fedensemble]
_RECIPES += [fedsparse, feddrop, fedpm, fedmask, vardrop, lg_fedavg, lg_fedsparse, local_only, mtl]
_RECIPES += [scaffold, feddyn, ditto, apfl, fedper, fedrep, fedbabu]
methods: Registry[Method] = Registry("method", _RECIPES)
