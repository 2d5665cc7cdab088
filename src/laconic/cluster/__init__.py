"""Runs on a Ray cluster: the embedded engine's round, with worker processes on as many machines as there are.

`Machines` is a pool with an actor on every machine of the cluster, which reads the data once and forks workers that
share them. A local update is a function of its job and of what is shared, so a machine that dies costs a retry on
another one, and the bits are those of the embedded engine. Ray itself (the extra `ray`) is imported when a run starts.
"""

from laconic.cluster.connect import Cluster, Place, find_ray, on_node, places, require_room
from laconic.cluster.machine import Identity, Machine, made_with, unlike_versions
from laconic.cluster.pool import Machines, on_cluster

__all__ = [
    "Cluster",
    "Identity",
    "Machine",
    "Machines",
    "Place",
    "find_ray",
    "made_with",
    "on_cluster",
    "on_node",
    "places",
    "require_room",
    "unlike_versions",
]
