from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np
import pytest
import torch

from laconic.core import ClientData, DataError
from laconic.data import Federation

RNG = np.random.default_rng(0)
X, Y = RNG.random((200, 5)), np.arange(200) % 4


def test_from_arrays_holds_out_class_by_class() -> None:
    federation = Federation.from_arrays((X, Y), clients=8)
    assert federation.num_clients == 8
    assert federation.kind == "classification"
    assert federation.classes == 4
    assert federation.shape == (5,)
    assert federation.dropped == 0
    assert len(federation.test) == 40
    assert np.bincount(federation.test.tensors()[1]).tolist() == [10] * 4
    assert len(federation.train) == 160
    assert sum(len(federation.client(i).test) for i in range(8)) == 40


def test_every_example_is_there_once_with_its_target() -> None:
    x = np.arange(200.0)[:, None]
    federation = Federation.from_arrays((x, np.arange(200) % 7), clients=5, partition="dirichlet")
    seen = []
    for client in range(5):
        for part in (federation.client(client).train, federation.client(client).test):
            inputs, targets = part.tensors()
            assert torch.equal(inputs[:, 0].long() % 7, targets)
            seen += inputs[:, 0].tolist()
    assert sorted(seen) == list(range(200))


def test_from_arrays_with_a_test_set() -> None:
    federation = Federation.from_arrays((X, Y), (X[:30], Y[:30]), clients=10)
    assert len(federation.test) == 30
    assert torch.equal(federation.test.tensors()[0], torch.from_numpy(X[:30]).float())
    assert [federation.examples(i) for i in range(10)] == [20] * 10


def test_tensors_and_arrays_are_the_same() -> None:
    one = Federation.from_arrays((X, Y), clients=4, partition="dirichlet", seed=1)
    two = Federation.from_arrays((torch.from_numpy(X), torch.from_numpy(Y)), clients=4, partition="dirichlet", seed=1)
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.client(2).train.index, two.client(2).train.index)


def test_kinds_of_inputs() -> None:
    images = RNG.integers(0, 256, (20, 3, 4, 4), dtype=np.uint8)
    federation = Federation.from_arrays((images, Y[:20].astype(np.uint16)), clients=2)
    assert federation.x.dtype == torch.float32
    assert 0 <= float(federation.x.min()) < float(federation.x.max()) <= 1
    assert federation.y.dtype == torch.int64
    tokens = Federation.from_arrays((RNG.integers(0, 99, (20, 7)), Y[:20]), clients=2)
    assert tokens.x.dtype == torch.int64


def test_inputs_are_not_changed() -> None:
    x, y = X.astype(np.float32).copy(), Y.copy()
    federation = Federation.from_arrays((x, y), (x, y), clients=4)
    federation.x.zero_()
    assert np.array_equal(x, X.astype(np.float32))


def test_regression() -> None:
    federation = Federation.from_arrays((X, X.sum(axis=1)), clients=4)
    assert federation.kind == "regression"
    assert federation.classes == 0
    assert federation.y.shape == (200, 1)
    with pytest.raises(DataError, match="no labels to count"):
        federation.label_counts()


def test_label_counts() -> None:
    federation = Federation.from_arrays((X, Y), clients=8, partition={"kind": "dirichlet", "alpha": 0.2})
    counts = federation.label_counts()
    for client in range(8):
        own = np.bincount(federation.client(client).train.tensors()[1], minlength=4)
        assert counts[client].tolist() == own.tolist()


def test_groups() -> None:
    writers = np.array(["ann", "bob", "cy", "di"])[np.arange(200) // 50]
    federation = Federation.from_arrays((X, Y), groups=writers, partition="groups", test_fraction=0.1)
    assert federation.num_clients == 4
    assert [len(federation.client(i).test) for i in range(4)] == [5] * 4
    given = Federation.from_arrays(
        (X, Y), (X[:8], Y[:8]), groups=writers, test_groups=["ann", "di"] * 4, partition="groups"
    )
    assert [len(given.client(i).test) for i in range(4)] == [4, 0, 0, 4]


def test_protected_attributes_follow_their_rows() -> None:
    marks = torch.from_numpy(X[:, :2]).float()
    federation = Federation.from_arrays((X, Y), protected=marks, clients=4)
    part = federation.client(1).train
    assert federation.protected is not None
    assert torch.equal(federation.protected[part.index], part.tensors()[0][:, :2])


def test_from_clients() -> None:
    parts = [(X[i : i + 20], Y[i : i + 20]) for i in range(0, 200, 20)]
    federation = Federation.from_clients(parts, test_fraction=0.25)
    assert [federation.examples(i) for i in range(10)] == [15] * 10
    assert len(federation.test) == 50
    own = torch.cat([federation.client(3).train.tensors()[0], federation.client(3).test.tensors()[0]])
    assert set(map(tuple, own.tolist())) == set(map(tuple, torch.from_numpy(X[60:80]).float().tolist()))


def test_from_clients_with_tests() -> None:
    parts = [(X[:50], Y[:50]), (X[50:60], Y[50:60])]
    common = Federation.from_clients(parts, (X[100:], Y[100:]))
    assert len(common.test) == 100
    assert common.examples(0) == 50
    assert len(common.client(0).test) == 0
    own = Federation.from_clients(parts, client_tests=[(X[60:63], Y[60:63]), (X[70:75], Y[70:75])])
    assert [len(own.client(i).test) for i in range(2)] == [3, 5]
    assert len(own.test) == 8


def test_a_client_with_one_example_keeps_it_for_training() -> None:
    federation = Federation.from_clients([(X[:1], Y[:1]), (X[1:9], Y[1:9])])
    assert federation.examples(0) == 1
    assert len(federation.client(0).test) == 0


def test_a_hundred_thousand_clients_are_cheap() -> None:
    x, y = torch.zeros(200_000, 1), torch.zeros(200_000, dtype=torch.int64)
    federation = Federation.from_arrays((x, y), clients=100_000, test_fraction=0.1)
    indices = [federation.train_rows.flat, federation.train_rows.offsets, federation.test_rows.flat]
    assert sum(array.nbytes for array in indices) < 5_000_000
    began = time.perf_counter()
    for client in range(0, 100_000, 100):
        data = federation.client(client)
        assert data.train.x is federation.x
    assert time.perf_counter() - began < 0.5
    assert isinstance(data, ClientData)


def test_pickles() -> None:
    federation = Federation.from_arrays((X, Y), clients=4)
    again = pickle.loads(pickle.dumps(federation))
    assert torch.equal(again.client(2).train.tensors()[0], federation.client(2).train.tensors()[0])


def _with_nan() -> np.ndarray:
    x = X.copy()
    x[17, 2] = np.nan
    return x


@pytest.mark.parametrize(
    ("train", "arguments", "message"),
    [
        ((X, Y[:-1]), {}, "200 inputs but 199 targets"),
        ((_with_nan(), Y), {}, "train x is not finite in row 17"),
        ((X, np.where(Y == 0, np.inf, 1.0)), {}, "train y is not finite in row 0"),
        ((X.astype(str), Y), {}, "not numeric; encode it as numbers"),
        ((X, Y.astype(str)), {}, "not numeric; np.unique"),
        ((X.astype(complex), Y), {}, "not numeric"),
        ((X[:0], Y[:0]), {}, "train is empty"),
        ((X[:, 0], Y), {}, "an axis of examples and one of features"),
        ((X, Y - 1), {}, "label -1, but classes are numbered from 0"),
        ((X, Y[:, None]), {}, "class labels need one axis"),
        ((X, Y), {"classes": 3}, "label 3 does not exist among 3 classes"),
        ((X, X[:, 0]), {"classes": 3}, "y holds floats"),
        ((X, Y), {"test": (X, Y), "test_fraction": 0.1}, "either test or test_fraction"),
        ((X, Y), {"test": (X[:, :2], Y)}, "give both in the same form"),
        ((X, Y), {"test": (X, X[:, 0])}, "give both in the same form"),
        ((X, Y), {"test_fraction": 1.0}, "test_fraction must be"),
        ((X, Y), {"groups": Y[:3]}, "groups has 3 entries"),
        ((X, Y), {"groups": Y, "test": (X, Y)}, "one group per example"),
        ((X, Y), {"coarse": [0, 1]}, "coarse has 2 entries, but there are 4 classes"),
        (([[1.0], [1.0, 2.0]], [0, 1]), {}, "no rectangular array"),
        (X, {}, r"must be a pair \(x, y\)"),
    ],
)
def test_errors_say_what_is_wrong(train: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Federation.from_arrays(train, **{"clients": 4, **arguments})


@pytest.mark.parametrize(
    ("clients", "arguments", "message"),
    [
        ([], {}, "list of clients is empty"),
        ([(X, Y), (X[:0], Y[:0])], {}, "client 1 has no examples"),
        ([(X, Y), (X[:, :2], Y)], {}, "client 1 has x of shape"),
        ([(X, Y), (X, Y[:3])], {}, "client 1 has 200 inputs but 3 targets"),
        ([(X, Y)], {"client_tests": []}, "1 clients but 0 test sets"),
        ([(X, Y)], {"client_tests": [(X, Y)], "test_fraction": 0.5}, "either client_tests or test_fraction"),
    ],
)
def test_errors_of_from_clients(clients: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Federation.from_clients(clients, **arguments)


@pytest.mark.parametrize("client", [-1, 4])
def test_no_such_client(client: int) -> None:
    federation = Federation.from_arrays((X, Y), clients=4)
    with pytest.raises(DataError, match="its clients are 0 to 3"):
        federation.client(client)
    with pytest.raises(DataError, match="its clients are 0 to 3"):
        federation.examples(client)


def test_training_on_test_rows_is_refused() -> None:
    good = Federation.from_arrays((X, Y), clients=4)
    with pytest.raises(DataError, match="among both training and test rows"):
        Federation("bad", good.x, good.y, good.train_rows, good.test_rows, torch.arange(200), classes=4)


def test_channels_last() -> None:
    images = np.random.default_rng(0).normal(size=(12, 3, 4, 4))
    data = Federation.from_arrays((images, np.arange(12) % 3), clients=2)
    turned = data.channels_last()
    assert torch.equal(data.x, turned.x)
    assert turned.client(1).train.tensors()[0].stride(1) == 1
    with pytest.raises(DataError, match="channels_last is for images"):
        Federation.from_arrays((np.eye(12), np.arange(12) % 3), clients=2).channels_last()
