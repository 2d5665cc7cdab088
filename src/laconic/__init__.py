"""laconic: federated learning in few bits.

>>> import laconic as lc
>>> run = lc.fit(method=lc.fedavg(), data=lc.data.digits(clients=10), rounds=1, cohort=3, workers=0)
>>> run.summary["bytes_up"] == 3 * (40 + 4 * run.summary["parameters"])
True
"""

from laconic import codecs, data, models
from laconic.comparison import Comparison, compare
from laconic.core import (
    ClientData,
    ClientInfo,
    Codec,
    ConfigError,
    DataError,
    Key,
    LaconicError,
    Leaf,
    Method,
    Part,
    PayloadError,
    Predictor,
    Reply,
    RunError,
    Shared,
    Spec,
    Task,
    Tree,
    Update,
    UserError,
    accuracy,
)
from laconic.data import Federation
from laconic.engine import Run, load, simulate
from laconic.experiment import fit
from laconic.export import export
from laconic.methods import (
    Depth,
    KeepLocal,
    ServerOptimizer,
    Solver,
    adam,
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
    mtl,
    sgd,
    vardrop,
)

__all__ = [
    # run
    "fit",
    "compare",
    "simulate",
    "load",
    "export",
    "Run",
    "Comparison",
    # parts
    "codecs",
    "data",
    "models",
    "Federation",
    # methods
    "fedavg",
    "fedprox",
    "fedopt",
    "fedmedian",
    "fedensemble",
    "fedsparse",
    "feddrop",
    "fedpm",
    "fedmask",
    "vardrop",
    "lg_fedavg",
    "lg_fedsparse",
    "local_only",
    "mtl",
    "KeepLocal",
    "Depth",
    "Solver",
    "ServerOptimizer",
    "sgd",
    "adam",
    # vocabulary, for methods and codecs of one's own
    "ClientData",
    "ClientInfo",
    "Codec",
    "Key",
    "Leaf",
    "Method",
    "Part",
    "Predictor",
    "Reply",
    "Shared",
    "Spec",
    "Task",
    "Tree",
    "Update",
    "accuracy",
    # errors
    "LaconicError",
    "UserError",
    "ConfigError",
    "DataError",
    "RunError",
    "PayloadError",
]
