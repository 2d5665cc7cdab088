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
    lg_fedavg,
    lg_fedsparse,
    local_only,
    methods,
    mtl,
    vardrop,
)
from laconic.methods.em import EM, Prior, Start, Vote, weighted_mean
from laconic.methods.gaussian import Gaussian
from laconic.methods.laplace import Laplace, median
from laconic.methods.local_global import Depth, KeepLocal
from laconic.methods.lockstep import Synchronous
from laconic.methods.mixture import Mixture, responsibilities
from laconic.methods.multitask import MultiTask
from laconic.methods.objectives import Adversary, Autoencoder, Jigsaw, Opponent
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Fit, Latent, Pull, Solver, adam, fit, sgd
from laconic.methods.spike_slab import SpikeSlab
from laconic.methods.submodel import SubModel
from laconic.methods.variational import Averaged, Posterior

__all__ = [
    "Adversary",
    "Autoencoder",
    "Averaged",
    "BernoulliMask",
    "Depth",
    "EM",
    "Fit",
    "Gaussian",
    "Jigsaw",
    "KeepLocal",
    "Laplace",
    "Latent",
    "Mixture",
    "MultiTask",
    "Opponent",
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
    "fedmask",
    "fedmedian",
    "fedopt",
    "fedpm",
    "fedprox",
    "fedsparse",
    "fit",
    "lg_fedavg",
    "lg_fedsparse",
    "local_only",
    "median",
    "methods",
    "mtl",
    "responsibilities",
    "sgd",
    "vardrop",
    "weighted_mean",
]
