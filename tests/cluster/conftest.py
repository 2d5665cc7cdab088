"""A small cluster on this machine: Ray's own, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from laconic.cluster.connect import QUIET

HERE = {"num_cpus": 1}
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # nothing leaves 127.0.0.1


class Nodes:
    """Three nodes of one CPU each; `kill` and `add` change that."""

    def __init__(self, count: int = 3, **options: Any) -> None:
        os.environ.update({**QUIET, **LOOPBACK})  # before Ray is imported
        import ray
        from ray.cluster_utils import Cluster

        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # where it had been imported already
        self.cluster = Cluster(initialize_head=True, head_node_args={**HERE, "include_dashboard": False})
        self.nodes = [self.cluster.add_node(**HERE, **options) for _ in range(count - 1)]
        self.cluster.wait_for_nodes()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="CRITICAL")

    def add(self, **options: Any) -> None:
        self.nodes.append(self.cluster.add_node(**HERE, **options))

    def kill(self, node: str | None = None) -> None:
        """End a node, not the head, without a word of farewell."""
        gone = next(each for each in self.nodes if node in (None, each.node_id))
        self.nodes.remove(gone)
        self.cluster.remove_node(gone, allow_graceful=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    pytest.importorskip("ray", reason="needs the extra ray")
    made = Nodes()
    try:
        yield made
    finally:
        made.close()
