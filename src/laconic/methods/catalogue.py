"""Every published method in a few lines. A newcomer looks here first.

Each function's keyword-only parameters are what `[method]` in a configuration may set; `solver` lends its fields.
"""

from __future__ import annotations

from typing import Literal

from laconic.core import Method, Registry
from laconic.methods.em import EM, Weighting
from laconic.methods.gaussian import Gaussian
from laconic.methods.laplace import Laplace
from laconic.methods.mixture import Mixture
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Solver


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


methods: Registry[Method] = Registry("method", [fedavg, fedprox, fedopt, fedmedian, fedensemble])
