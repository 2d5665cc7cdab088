"""Methods: what a client learns, what it sends and how the server combines it."""

from laconic.methods.bernoulli_mask import BernoulliMask
from laconic.methods.catalogue import (
    fedavg,
    feddrop,
    fedensemble,
    fedmask,
    fedmedian,
    fedopt,
    fedpm,
    fedprox,
    fedsparse,
    methods,
)
from laconic.methods.em import EM, Prior, Start, Vote, weighted_mean
from laconic.methods.gaussian import Gaussian
from laconic.methods.laplace import Laplace, median
from laconic.methods.mixture import Mixture, responsibilities
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Fit, Latent, Pull, Solver, adam, fit, sgd
from laconic.methods.spike_slab import SpikeSlab
from laconic.methods.submodel import SubModel

__all__ = [
    "BernoulliMask",
    "EM",
    "Fit",
    "Gaussian",
    "Laplace",
    "Latent",
    "Mixture",
    "Prior",
    "Pull",
    "ServerOptimizer",
    "Solver",
    "SpikeSlab",
    "Start",
    "SubModel",
    "Vote",
    "adam",
    "fedavg",
    "feddrop",
    "fedensemble",
    "fedmask",
    "fedmedian",
    "fedopt",
    "fedpm",
    "fedprox",
    "fedsparse",
    "fit",
    "median",
    "methods",
    "responsibilities",
    "sgd",
    "weighted_mean",
]
