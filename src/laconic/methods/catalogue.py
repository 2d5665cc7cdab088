"""Every published method in a few lines. A newcomer looks here first.

Each function's keyword-only parameters are what `[method]` in a configuration may set; `solver` lends its fields.
"""

from __future__ import annotations

from typing import Literal

from laconic.core import ConfigError, Method, Registry
from laconic.methods.em import EM, Weighting
from laconic.methods.gaussian import Gaussian
from laconic.methods.laplace import Laplace
from laconic.methods.lockstep import Synchronous
from laconic.methods.mixture import Mixture
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Solver
from laconic.methods.spike_slab import PRESETS, Sparsity, SpikeSlab, one_of
from laconic.methods.submodel import SubModel
from laconic.methods.variational import Averaged, Posterior


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

    `sparsity` is a preset of `lambda0` (5e-7, 5e-6, 5e-5); `lambda0` itself goes before it.
    """
    one_of("sparsity", sparsity, tuple(PRESETS))
    return SpikeSlab(
        "fedsparse",
        PRESETS[sparsity] if lambda0 is None else lambda0,
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


def vardrop(
    *,
    share_alpha: bool = False,
    threshold: float = 3.0,
    first_log_sigma2: float = -10.0,
    kl_scale: float = 1.0,
    kl_size: Literal["local", "federation"] = "local",
    kl_start: float = 0.0,
    kl_full: float = 0.0,
    sigma_lr: float = 1.0,
    decay_rounds: int | None = None,
    ghost_updates: bool = False,
    vote: float = 0.0,
    check_every: int = 100,
    weighting: Weighting = "uniform",
    solver: Solver = Solver(optimizer="adam", lr=1e-3, local_steps=1, batch_size=128),
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
        if decay_rounds is not None or ghost_updates or vote:
            raise ConfigError("decay_rounds, ghost_updates and vote are for vardrop with local_steps = 1.")
        return Averaged("vardrop", posterior, solver, weighting)
    if weighting != "uniform":
        raise ConfigError("vardrop with local_steps = 1 averages gradients of equal batches: weighting is 'uniform'.")
    return Synchronous("vardrop", posterior, solver, decay_rounds, ghost_updates, vote, check_every)


methods: Registry[Method] = Registry(
    "method", [fedavg, fedprox, fedopt, fedmedian, fedensemble, fedsparse, feddrop, vardrop]
)
