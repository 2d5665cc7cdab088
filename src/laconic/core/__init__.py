"""The vocabulary: trees, keys, tasks, the seams and the errors. Imports nothing else of laconic."""

from laconic.core.data import ClientData, ClientInfo, Part
from laconic.core.errors import (
    ConfigError,
    DataError,
    LaconicError,
    PayloadError,
    RunError,
    UserError,
    did_you_mean,
)
from laconic.core.objects import find_object
from laconic.core.protocols import Codec, Method, Predictor, Reply, Shared, Update
from laconic.core.random import Key, isolated
from laconic.core.registry import Registry, checked_settings, flat, resolved_settings
from laconic.core.task import Loss, Metric, Task, accuracy, bound_task, read_state, write_state
from laconic.core.tree import (
    Leaf,
    Spec,
    Tree,
    describe,
    exact_names,
    leaf_bytes,
    map_tree,
    num_values,
    prefixed,
    resolve,
    spec_of,
    subtree,
    tree_sha256,
)

__all__ = [
    "ClientData",
    "ClientInfo",
    "Codec",
    "ConfigError",
    "DataError",
    "Key",
    "LaconicError",
    "Leaf",
    "Loss",
    "Method",
    "Metric",
    "Part",
    "PayloadError",
    "Predictor",
    "Registry",
    "Reply",
    "RunError",
    "Shared",
    "Spec",
    "Task",
    "Tree",
    "Update",
    "UserError",
    "accuracy",
    "bound_task",
    "checked_settings",
    "describe",
    "did_you_mean",
    "exact_names",
    "find_object",
    "flat",
    "isolated",
    "leaf_bytes",
    "map_tree",
    "num_values",
    "prefixed",
    "read_state",
    "resolve",
    "resolved_settings",
    "spec_of",
    "subtree",
    "tree_sha256",
    "write_state",
]
