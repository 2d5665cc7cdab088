"""How a split is told in few numbers."""

from __future__ import annotations

import json

import numpy as np

from laconic.data import Federation, digits, split_of, synthetic


def test_a_small_split_is_told_whole() -> None:
    federation = digits(clients=7, partition={"kind": "dirichlet", "alpha": 0.3})
    split, counts = split_of(federation), federation.label_counts()
    assert split["table"] == counts.tolist()
    assert split["table_clients"] == list(range(7))
    assert (split["clients"], split["classes"], split["labels_per_column"]) == (7, 10, 1)
    assert (split["total"], split["test"]) == (counts.sum(), len(federation.common))
    middle = split["quantiles"].index(0.5)
    assert split["examples"][middle] == np.median(counts.sum(axis=1))
    assert split["labels"][middle] == np.median((counts > 0).sum(axis=1))
    share = counts.max(axis=1) / counts.sum(axis=1)
    assert np.allclose(split["largest_share"], np.quantile(share, split["quantiles"]), atol=1e-5)


def test_many_clients_and_classes_are_told_in_few_bytes() -> None:
    clients, classes = 100_000, 250
    y = np.random.default_rng(0).integers(0, classes, 3 * clients)
    federation = Federation.from_arrays((np.zeros((len(y), 1)), y), clients=clients, classes=classes, partition="iid")
    split = split_of(federation)
    assert len(json.dumps(split)) < 80_000
    assert split["labels_per_column"] == 3
    assert np.asarray(split["table"]).shape == (200, 84)
    assert (split["table_clients"][0], split["table_clients"][-1]) == (0, clients - 1)
    for row, client in zip(split["table"], split["table_clients"], strict=True):
        labels = federation.y[federation.train_rows[client]].numpy()
        assert np.array_equal(row, np.bincount(labels // 3, minlength=84))
    assert split["total"] == len(federation.train_rows.flat)


def test_regression_has_no_labels() -> None:
    split = split_of(synthetic(clients=5))
    assert (split["clients"], split["classes"]) == (5, 0)
    assert "table" not in split


def test_clients_without_examples() -> None:
    federation = Federation.from_clients(
        [(np.zeros((3, 1)), np.array([0, 0, 1]))] * 2, (np.zeros((1, 1)), np.zeros(1, int))
    )
    empty = federation.train_rows.from_lists([federation.train_rows.flat, []])
    split = split_of(Federation("x", federation.x, federation.y, empty, federation.test_rows, federation.common, 2))
    assert split["table"] == [[4, 2], [0, 0]]
    assert (split["examples"][0], split["labels"][0]) == (0, 0)
    assert split["largest_share"] == [round(4 / 6, 6)] * 7
