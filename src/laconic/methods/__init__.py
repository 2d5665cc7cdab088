"""Methods: what a client learns, what it sends and how the server combines it."""

from laconic.methods.bernoulli_mask import BernoulliMask
from laconic.methods.catalogue import (
    apfl,
    ditto,
    fedavg,
    fedbabu,
    feddrop,
    feddyn,
    fedensemble,
    fedmask,
    fedmedian,
    fedopt,
    fedper,
    fedpm,
    fedprox,
    fedrep,
    fedrobust,
    fedsparse,
    lg_fedavg,
    lg_fedsparse,
    local_only,
    methods,
    mtl,
    scaffold,
    vardrop,
)
from laconic.methods.em import EM, Companion, Fitted, Learnt, Origin, Prior, Vote, weighted_mean
from laconic.methods.gaussian import Gaussian
from laconic.methods.laplace import Laplace, median
from laconic.methods.local_global import Depth, KeepLocal
from laconic.methods.mixture import Mixture, responsibilities
from laconic.methods.multitask import MultiTask
from laconic.methods.objectives import Adversary, Autoencoder, Jigsaw, Opponent
from laconic.methods.private_masks import private_masks
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Latent, Pull, Solved, Solver, adam, sgd, solve
from laconic.methods.spike_slab import SpikeSlab
from laconic.methods.submodel import SubModel
from laconic.methods.synchronous import Synchronous
from laconic.methods.variational import Averaged, Posterior

__all__ = [
    "Adversary",
    "Autoencoder",
    "Averaged",
    "BernoulliMask",
    "Companion",
    "Depth",
    "EM",
    "Solved",
    "Fitted",
    "Gaussian",
    "Jigsaw",
    "KeepLocal",
    "Laplace",
    "Latent",
    "Learnt",
    "Mixture",
    "MultiTask",
    "Opponent",
    "Origin",
    "Posterior",
    "Prior",
    "Pull",
    "ServerOptimizer",
    "Solver",
    "SpikeSlab",
    "SubModel",
    "Synchronous",
    "Vote",
    "adam",
    "apfl",
    "ditto",
    "fedavg",
    "fedbabu",
    "feddrop",
    "feddyn",
    "fedensemble",
    "fedmask",
    "fedmedian",
    "fedopt",
    "fedper",
    "fedpm",
    "fedprox",
    "fedrep",
    "fedrobust",
    "fedsparse",
    "solve",
    "lg_fedavg",
    "lg_fedsparse",
    "local_only",
    "median",
    "methods",
    "mtl",
    "private_masks",
    "responsibilities",
    "scaffold",
    "sgd",
    "vardrop",
    "weighted_mean",
]
