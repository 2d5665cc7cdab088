"""Methods: what a client learns, what it sends and how the server combines it."""

from laconic.methods.catalogue import fedavg, fedensemble, fedmedian, fedopt, fedprox, methods
from laconic.methods.em import EM, Prior, Start, Vote, weighted_mean
from laconic.methods.gaussian import Gaussian
from laconic.methods.laplace import Laplace, median
from laconic.methods.mixture import Ensemble, Mixture, responsibilities
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Fit, Pull, Solver, adam, fit, sgd

__all__ = [
    "EM",
    "Ensemble",
    "Fit",
    "Gaussian",
    "Laplace",
    "Mixture",
    "Prior",
    "Pull",
    "ServerOptimizer",
    "Solver",
    "Start",
    "Vote",
    "adam",
    "fedavg",
    "fedensemble",
    "fedmedian",
    "fedopt",
    "fedprox",
    "fit",
    "median",
    "methods",
    "responsibilities",
    "sgd",
    "weighted_mean",
]
