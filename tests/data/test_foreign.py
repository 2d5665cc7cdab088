from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from laconic.core import DataError
from laconic.data import Examples, Federation, assign


class ByRemainder:
    """A partitioner with the documented interface of `flwr_datasets`: a dataset is set, then parts are loaded."""

    def __init__(self, num_partitions: int, *, overlap: bool = False) -> None:
        self._dataset: Any = None
        self._num_partitions = num_partitions
        self._overlap = overlap

    @property
    def dataset(self) -> Any:
        return self._dataset

    @dataset.setter
    def dataset(self, value: Any) -> None:
        if self._dataset is not None:
            raise RuntimeError("The dataset should be assigned only once")
        self._dataset = value

    @property
    def num_partitions(self) -> int:
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Any:
        labels = self.dataset["label"]
        start = 0 if self._overlap else partition_id
        chosen = [row for row, label in enumerate(labels) if label % self._num_partitions == start]
        return self.dataset.select(chosen)


class Sharding(ByRemainder):
    def load_partition(self, partition_id: int) -> Any:
        return self.dataset.shard(num_shards=self._num_partitions, index=partition_id, contiguous=True)


class ByGroup(ByRemainder):
    def load_partition(self, partition_id: int) -> Any:
        return self.dataset.select(np.flatnonzero(np.array(self.dataset["group"]) == partition_id))


EXAMPLES = Examples(np.arange(240) % 6, 180, 6, groups=np.arange(240) % 7)


def test_rows_are_found_again() -> None:
    dealt = assign(EXAMPLES, clients=3, partition=ByRemainder(3))
    for client in range(3):
        assert set(EXAMPLES.labels[dealt.train[client]] % 3) == {client}
    assert dealt.train.sizes.tolist() == [60, 60, 60]


def test_test_rows_follow_the_classes() -> None:
    dealt = assign(Examples(EXAMPLES.labels, 180, 6), clients=None, partition=ByRemainder(3))
    for client in range(3):
        assert set(EXAMPLES.labels[dealt.test[client]] % 3) == {client}
    assert dealt.test.sizes.tolist() == [20, 20, 20]


def test_test_rows_follow_whole_groups() -> None:
    assert EXAMPLES.groups is not None
    dealt = assign(EXAMPLES, clients=7, partition=ByGroup(7))
    for client in range(7):
        assert set(EXAMPLES.groups[dealt.test[client]]) == {client}


def test_regression() -> None:
    x = np.random.default_rng(0).random((50, 3))
    federation = Federation.from_arrays((x, x.sum(axis=1)), partition=Sharding(4))
    assert federation.num_clients == 4
    assert sorted(len(federation.client(i).test) for i in range(4)) == [2, 2, 3, 3]


def test_number_of_clients_must_agree() -> None:
    with pytest.raises(DataError, match="makes 3 clients, but clients is 5; set clients = 3"):
        assign(EXAMPLES, clients=5, partition=ByRemainder(3))


def test_overlap_is_refused() -> None:
    with pytest.raises(DataError, match="to more than one client"):
        assign(EXAMPLES, clients=3, partition=ByRemainder(3, overlap=True))


def test_a_partitioner_serves_once() -> None:
    partitioner = ByRemainder(3)
    assign(EXAMPLES, clients=3, partition=partitioner)
    with pytest.raises(DataError, match="make a new one for each"):
        assign(EXAMPLES, clients=3, partition=partitioner)


@pytest.mark.filterwarnings("ignore")
def test_the_real_library() -> None:
    library = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    dirichlet = library.DirichletPartitioner(num_partitions=4, partition_by="label", alpha=1.0, min_partition_size=1)
    dealt = assign(EXAMPLES, clients=4, partition=dirichlet)
    assert dealt.train.sizes.sum() == 180
    natural = library.NaturalIdPartitioner(partition_by="group")
    assert len(assign(EXAMPLES, clients=None, partition=natural).train) == 7
