"""What a round on Ray takes beside one of the embedded engine: LeNet5-FS, FedAvg, ten clients, two workers each way.

Once with one machine of two CPUs (an actor with two workers: what `laconic run --engine ray` starts), once with two
machines of one CPU (two actors). Ratios are medians of interleaved repetitions in one run; nothing else should be
running.

    python -m benchmarks.ray [--repetitions 7]      exits with 1 where Ray takes more than 15 % longer
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from benchmarks.rounds import Bar, images, interleaved, simulation
from laconic.cluster import Cluster, Machines
from laconic.cluster.connect import QUIET
from laconic.models import lenet5_fs

LIMIT = 1.15


def against_embedded(cpus: list[int], repetitions: int) -> Bar:
    """Rounds on a cluster whose machines have so many CPUs, over rounds in worker processes."""
    os.environ.update({**QUIET, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
    import ray
    from ray.cluster_utils import Cluster as Nodes

    federation, build = images(100), partial(lenet5_fs, (1, 28, 28), 10)
    embedded = simulation(federation, build, lr=0.05, batch_size=20)
    spread = simulation(federation, build, lr=0.05, batch_size=20)
    work = (spread.agreement, spread.clients)
    spread.carrier = lambda simulation: Machines(simulation, Cluster(), work)
    first, *others = cpus
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": first, "include_dashboard": False})
    try:
        for number in others:
            nodes.add_node(num_cpus=number)
        nodes.wait_for_nodes()
        ray.init(address=nodes.address, log_to_driver=False, logging_level="CRITICAL")
        runs = {"embedded": iter(embedded), "ray": iter(spread)}
        name = f"LeNet5-FS, round time, Ray with {' + '.join(map(str, cpus))} CPUs / embedded"
        return interleaved(name, runs, limit=LIMIT, rounds=2, repetitions=repetitions)
    finally:
        ray.shutdown()
        nodes.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    repetitions = parser.parse_args().repetitions
    bars = []
    for cpus in ([2], [1, 1]):
        bars.append(against_embedded(cpus, repetitions))
        print(bars[-1].line(), flush=True)
    return int(not all(bar.met for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
