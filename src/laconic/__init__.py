"""laconic: federated learning in few bits.

>>> import laconic as lc
>>> run = lc.fit(method=lc.fedavg(), data=lc.data.digits(clients=10), rounds=1, cohort=3, workers=0)
>>> run.summary["bytes_up"] == 3 * (40 + 4 * run.summary["parameters"])
True
"""

from laconic import codecs, data, models
from laconic.core import (
    ClientData,
    ClientInfo,
    ConfigError,
    DataError,
    Key,
    LaconicError,
    Leaf,
    Part,
    PayloadError,
    Reply,
    RunError,
    Shared,
    Task,
    Tree,
    Update,
    UserError,
    accuracy,
)
from laconic.data import Federation
from laconic.engine import Run, simulate
from laconic.experiment import fit
from laconic.methods import (
    ServerOptimizer,
    Solver,
    adam,
    fedavg,
    fedensemble,
    fedmedian,
    fedopt,
    fedprox,
    sgd,
)

__all__ = [
    # run
    "fit",
    "simulate",
    "Run",
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
    "Solver",
    "ServerOptimizer",
    "sgd",
    "adam",
    # vocabulary, for methods and codecs of one's own
    "ClientData",
    "ClientInfo",
    "Key",
    "Leaf",
    "Part",
    "Reply",
    "Shared",
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
