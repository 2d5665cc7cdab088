"""laconic: federated learning in few bits.

>>> import laconic as lc
>>> run = lc.fit(method=lc.fedavg(), data=lc.data.digits(clients=10), rounds=1, cohort=3, workers=0)
>>> run.summary["bytes_up"] == 3 * (40 + 4 * run.summary["parameters"])
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic import codecs, data, models
    from laconic.comparison import Comparison
    from laconic.comparison.compare import compare
    from laconic.core import (
        Bound,
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
        Population,
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
        on_messages,
        perplexity,
    )
    from laconic.data import Federation
    from laconic.engine import Run
    from laconic.evaluations import Ensemble, FineTuned, Global, Local, Probe
    from laconic.experiment import fit, simulate
    from laconic.exports import export
    from laconic.methods import (
        Depth,
        KeepLocal,
        ServerOptimizer,
        Solver,
        adam,
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
        mtl,
        scaffold,
        sgd,
        vardrop,
    )
    from laconic.model_file import load
    from laconic.planning import Network, Plan, plan

__all__ = [
    # run
    "fit",
    "compare",
    "simulate",
    "load",
    "export",
    "Run",
    "Comparison",
    "plan",
    "Plan",
    "Network",
    # parts
    "codecs",
    "data",
    "models",
    "Federation",
    # what a run measures
    "Global",
    "Local",
    "Ensemble",
    "FineTuned",
    "Probe",
    # methods
    "fedavg",
    "fedprox",
    "fedopt",
    "scaffold",
    "feddyn",
    "fedmedian",
    "fedrobust",
    "fedensemble",
    "fedsparse",
    "feddrop",
    "fedpm",
    "fedmask",
    "vardrop",
    "lg_fedavg",
    "lg_fedsparse",
    "local_only",
    "fedper",
    "fedrep",
    "fedbabu",
    "ditto",
    "apfl",
    "mtl",
    "KeepLocal",
    "Depth",
    "Solver",
    "ServerOptimizer",
    "sgd",
    "adam",
    # vocabulary, for methods and codecs of one's own
    "Bound",
    "ClientData",
    "ClientInfo",
    "Codec",
    "Key",
    "Leaf",
    "Method",
    "Part",
    "Population",
    "Predictor",
    "Reply",
    "Shared",
    "Spec",
    "Task",
    "Tree",
    "Update",
    "accuracy",
    "perplexity",
    "on_messages",
    # errors
    "LaconicError",
    "UserError",
    "ConfigError",
    "DataError",
    "RunError",
    "PayloadError",
]

# What is imported when it is first asked for: torch takes a second, and `laconic --help` needs none of it.
_HOMES = {
    "laconic": "codecs data models",
    "laconic.comparison": "Comparison compare",
    "laconic.core": (
        "Bound ClientData ClientInfo Codec ConfigError DataError Key LaconicError Leaf Method Part "
        "PayloadError Population Predictor Reply RunError Shared Spec Task Tree Update UserError accuracy "
        "on_messages perplexity"
    ),
    "laconic.data": "Federation",
    "laconic.engine": "Run",
    "laconic.evaluations": "Ensemble FineTuned Global Local Probe",
    "laconic.experiment": "fit simulate",
    "laconic.exports": "export",
    "laconic.methods": (
        "Depth KeepLocal ServerOptimizer Solver adam apfl ditto fedavg fedbabu feddrop feddyn "
        "fedensemble fedmask fedmedian fedopt fedper fedpm fedprox fedrep fedrobust fedsparse lg_fedavg "
        "lg_fedsparse local_only mtl scaffold sgd vardrop"
    ),
    "laconic.model_file": "load",
    "laconic.planning": "Network Plan plan",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("laconic")
    if name not in _HOME:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}")
    home = _HOME[name]
    found = import_module(f"laconic.{name}") if home == "laconic" else getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
