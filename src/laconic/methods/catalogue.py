"""Every published method in a few lines. A newcomer looks here first.

Each function's keyword-only parameters are what `[method]` in a configuration may set; `solver` lends its fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from laconic.core import ConfigError, Goal, Method, Registry
from laconic.methods.bernoulli_mask import MASK_SOLVER, BernoulliMask, Evaluate, Reset, Ste
from laconic.methods.em import EM, Weighting
from laconic.methods.gaussian import Gaussian
from laconic.methods.laplace import Laplace
from laconic.methods.local_global import Depth, KeepLocal, Start
from laconic.methods.lockstep import Synchronous
from laconic.methods.mixture import Mixture
from laconic.methods.multitask import MultiTask, Omega
from laconic.methods.objectives import Kind, Opponent, objective_of
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Solver
from laconic.methods.spike_slab import Sparsity, SpikeSlab
from laconic.methods.submodel import SubModel
from laconic.methods.variational import Averaged, Posterior
from laconic.models.frozen import FrozenScale
from laconic.privacy import MaskPrivacy


def fedavg(*, weighting: Weighting = "uniform", solver: Solver = Solver()) -> EM:
    """Federated averaging (McMahan et al., 2017): the mean of the clients' weights."""
    return EM("fedavg", Gaussian(), solver, weighting=weighting)


def fedprox(*, mu: float = 0.01, weighting: Weighting = "uniform", solver: Solver = Solver()) -> EM:
    """FedAvg with a Gaussian prior of precision `mu` around the server's weights (Li et al., 2020)."""
    return EM("fedprox", Gaussian(mu), solver, weighting=weighting)


def fedopt(
    *,
    server: ServerOptimizer = ServerOptimizer("adam", lr=0.01),
    mu: float = 0.0,
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> EM:
    """Any torch optimizer on the mean difference (Reddi et al., 2021): FedAdam, FedAdagrad, server momentum …"""
    return EM("fedopt", Gaussian(mu), solver, server, weighting)


def fedmedian(
    *,
    penalty: float = 1e-4,
    server: ServerOptimizer | None = None,
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> EM:
    """A Laplace prior: soft-thresholded clients, coordinate-wise median on the server (Louizos et al., 2021)."""
    return EM("fedmedian", Laplace(penalty), solver, server, weighting)


def fedensemble(
    *,
    members: int = 3,
    precision: float = 0.1,
    normalized: bool = False,
    start_from: Literal["random", "best"] = "random",
    server: ServerOptimizer | None = None,
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> EM:
    """A mixture of Gaussians: the server learns an ensemble of `members` models (Louizos et al., 2021)."""
    return EM("fedensemble", Mixture(members, precision, normalized, start_from), solver, server, weighting)


def fedsparse(
    *,
    sparsity: Sparsity = "mid",
    lambda0: float | None = None,
    lambda_: float = 0.0,
    xi: float = 1e-4,
    temperature: float = 1e-3,
    epsilon: float = 0.1,
    l0_count: Literal["params", "groups"] = "params",
    structured: bool = True,
    gate_output: bool = False,
    prune: bool = True,
    gates: Literal["sampled", "open"] = "sampled",
    threshold_lr: float = 1e-3,
    server: ServerOptimizer | None = ServerOptimizer("adam", lr=0.01),
    thresholds: ServerOptimizer = ServerOptimizer("adamax", lr=0.01),
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> SpikeSlab:
    """A spike-and-slab prior: filters and neurons that do not pay are closed for good (Louizos et al., 2021).

    `sparsity` is a preset of `lambda0` for the model at hand; `lambda0` itself goes before it.
    """
    return SpikeSlab(
        "fedsparse",
        sparsity,
        lambda0,
        lambda_,
        xi,
        temperature,
        epsilon,
        l0_count,
        structured,
        gate_output,
        prune,
        gates,
        threshold_lr,
        solver,
        server,
        thresholds,
        weighting,
    )


def feddrop(
    *,
    conv_rate: float = 0.1,
    fc_rate: float = 0.5,
    first_rate: float = 0.01,
    streams: Literal["shared", "kept"] = "shared",
    scale: bool = False,
    server: ServerOptimizer | None = ServerOptimizer("adam", lr=0.01),
    weighting: Weighting = "uniform",
    solver: Solver = Solver(),
) -> SubModel:
    """Federated dropout: every client trains a sub-model without some of the units (Caldas et al., 2018)."""
    return SubModel("feddrop", conv_rate, fc_rate, first_rate, streams, scale, solver, server, weighting)


def fedpm(
    *,
    lambda0: float = 1.0,
    reset: Reset = "auto",
    ste: Ste = "identity",
    persist_optimizer: bool = False,
    scale: FrozenScale = "e",
    shrink: float = 0.01,
    evaluate: Evaluate = "threshold",
    threshold: float = 0.5,
    samples: int = 5,
    privacy: MaskPrivacy | None = None,
    spread: float = 1.0,
    solver: Solver = MASK_SOLVER,
) -> BernoulliMask:
    """A mask of a frozen random network is learnt, and one bit per parameter sent (Isik et al., 2023)."""
    return BernoulliMask(
        "fedpm",
        True,
        lambda0,
        reset,
        ste,
        persist_optimizer,
        scale,
        shrink,
        evaluate,
        threshold,
        samples,
        solver,
        privacy,
        spread,
    )


def fedmask(
    *,
    persist_optimizer: bool = False,
    scale: FrozenScale = "e",
    shrink: float = 0.01,
    threshold: float = 0.5,
    solver: Solver = MASK_SOLVER,
) -> BernoulliMask:
    """FedPM without chance: masks are what is more likely than not (Li et al., 2021, as the FedPM paper has it)."""
    return BernoulliMask(
        "fedmask",
        False,
        reset=1,
        persist_optimizer=persist_optimizer,
        scale=scale,
        shrink=shrink,
        threshold=threshold,
        solver=solver,
    )


def vardrop(
    *,
    share_alpha: bool = False,
    threshold: float = 3.0,
    first_log_sigma2: float = -8.0,
    kl_scale: float = 1.0,
    kl_size: Literal["local", "federation"] = "federation",
    kl_start: float = 0.0,
    kl_full: float = 0.0,
    sigma_lr: float = 10.0,
    decay_rounds: int | None = None,
    ghost_updates: bool = False,
    vote: float | None = None,
    check_every: int = 100,
    weighting: Weighting = "uniform",
    solver: Solver = Solver(optimizer="adam", lr=2e-3, local_steps=1, batch_size=128),
) -> Synchronous | Averaged:
    """Variational dropout: sparse gradients and a sparse model at once (Du et al., 2018).

    With `local_steps = 1` a round is one iteration of synchronous SGD, as published; with more, clients send sparse
    differences and may sit rounds out.
    """
    posterior = Posterior(
        share_alpha=share_alpha,
        threshold=threshold,
        first_log_sigma2=first_log_sigma2,
        kl_scale=kl_scale,
        kl_size=kl_size,
        kl_start=kl_start,
        kl_full=kl_full,
        sigma_lr=sigma_lr,
    )
    if solver.local_steps != 1:
        if decay_rounds is not None or ghost_updates or vote is not None:
            raise ConfigError("decay_rounds, ghost_updates and vote are for vardrop with local_steps = 1.")
        return Averaged("vardrop", posterior, solver, weighting)
    if weighting != "uniform":
        raise ConfigError("vardrop with local_steps = 1 averages gradients of equal batches: weighting is 'uniform'.")
    vote = 0.5 if vote is None else vote
    return Synchronous("vardrop", posterior, solver, decay_rounds, ghost_updates, vote, check_every)


def lg_fedavg(
    *,
    global_layers: int = 1,
    global_part: Literal["last", "first"] = "last",
    private: tuple[str, ...] | None = None,
    fedavg_rounds: int = 0,
    goal: float | None = None,
    goal_on: Literal["validation", "test"] = "validation",
    start: Start = "server",
    lg_lr: float | None = None,
    mu: float = 0.0,
    warmup_epochs: int = 0,
    warmup_after: int = 0,
    objective: Kind = "supervised",
    objective_weight: float | None = None,
    permutations: int = 24,
    adversary: Opponent = Opponent(),
    weighting: Weighting = "examples",
    solver: Solver = Solver(),
) -> KeepLocal:
    """LG-FedAvg: private layers on the devices, a small global model among them (Liang et al., 2020).

    The `global_layers` layers at the `global_part` end are shared; or all but the leaves that match `private`.
    `fedavg_rounds` of FedAvg on the whole model come first (phase A), or as many as reach the accuracy `goal` at an
    evaluation, or whichever ends sooner; `lg_lr` is the learning rate after them.
    """
    method = EM("fedprox" if mu else "fedavg", Gaussian(mu), solver, weighting=weighting)
    end: Literal["last", "first"] = "first" if global_part == "last" else "last"
    return KeepLocal(
        method if lg_lr is None else replace(method, solver=replace(solver, lr=lg_lr)),
        Depth(end, shared_layers=global_layers) if private is None else private,
        called="lg_fedavg",
        first=None if lg_lr is None else method,
        first_rounds=fedavg_rounds,
        goal=None if goal is None else Goal(goal, goal_on),
        start=start,
        warmup_epochs=warmup_epochs,
        warmup_after=warmup_after,
        objective=objective_of(objective, weight=objective_weight, permutations=permutations, opponent=adversary),
    )


def lg_fedsparse(
    *,
    global_layers: int = 1,
    global_part: Literal["last", "first"] = "first",
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
) -> KeepLocal:
    """FedSparse on the layers that are shared, the others private: gates close units of the global part only.

    `fedavg_rounds` of FedAvg on the whole model come first, with the learning rate `fedavg_lr` (the solver's).
    """
    if fedavg_lr is not None and not fedavg_rounds:
        raise ConfigError("lg_fedsparse: fedavg_lr is the learning rate of fedavg_rounds, of which there are none.")
    first_solver = solver if fedavg_lr is None else replace(solver, lr=fedavg_lr)
    first = EM("fedavg", Gaussian(), first_solver, weighting=weighting)
    method = fedsparse(
        sparsity=sparsity,
        lambda0=lambda0,
        threshold_lr=threshold_lr,
        server=server,
        weighting=weighting,
        solver=solver,
    )
    end: Literal["last", "first"] = "first" if global_part == "last" else "last"
    leaves = Depth(end, shared_layers=global_layers) if private is None else private
    return KeepLocal(
        method,
        leaves,
        called="lg_fedsparse",
        first=first if fedavg_rounds else None,
        first_rounds=fedavg_rounds,
        start=start,
    )


def local_only(*, start: Start = "own", solver: Solver = Solver()) -> KeepLocal:
    """Every device by itself: no leaf is shared, nothing but empty messages travels."""
    return KeepLocal(EM("fedavg", Gaussian(), solver), ("*",), called="local_only", start=start, alone=True)


def mtl(*, lambda1: float = 1e-7, lambda2: float = 1e-7, omega: Omega = "mean", solver: Solver = Solver()) -> MultiTask:
    """Mean-regularised multi-task learning: own models, pulled to their mean (Evgeniou & Pontil, 2004)."""
    return MultiTask("mtl", lambda1, lambda2, omega, solver)


_RECIPES: list[Callable[..., Method]] = [fedavg, fedprox, fedopt, fedmedian, fedensemble, fedsparse, feddrop]
_RECIPES += [fedpm, fedmask, vardrop, lg_fedavg, lg_fedsparse, local_only, mtl]
methods: Registry[Method] = Registry("method", _RECIPES)
