"""Methods: what a client learns, what it sends and how the server combines it."""

from laconic.methods.catalogue import (
    fedavg,
    feddrop,
    fedensemble,
    fedmedian,
    fedopt,
    fedprox,
    fedsparse,
    methods,
    vardrop,
)
from laconic.methods.em import EM, Prior, Start, Vote, weighted_mean
from laconic.methods.gaussian import Gaussian
from laconic.methods.laplace import Laplace, median
from laconic.methods.lockstep import Synchronous
from laconic.methods.mixture import Ensemble, Mixture, responsibilities
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Fit, Latent, Pull, Solver, adam, fit, sgd
from laconic.methods.spike_slab import SpikeSlab
from laconic.methods.submodel import SubModel
from laconic.methods.variational import Averaged, Posterior

__all__ = [
    "Averaged",
    "EM",
    "Ensemble",
    "Fit",
    "Gaussian",
    "Laplace",
    "Latent",
    "Mixture",
    "Posterior",
    "Prior",
    "Pull",
    "ServerOptimizer",
    "Solver",
    "SpikeSlab",
    "Start",
    "SubModel",
    "Synchronous",
    "Vote",
    "adam",
    "fedavg",
    "feddrop",
    "fedensemble",
    "fedmedian",
    "fedopt",
    "fedprox",
    "fedsparse",
    "fit",
    "median",
    "methods",
    "responsibilities",
    "sgd",
    "vardrop",
    "weighted_mean",
]
