"""Partitions: who gets which examples. One function each, in the catalogue `partitions`.

A partition takes the examples, the number of clients and a key, and deals training rows and test rows by the same
mechanism, so that a client is tested on data like its own. A configuration writes it as its name, or as a table
with its settings: `partition = "iid"`, `partition = { kind = "dirichlet", alpha = 0.3 }`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from laconic.core import ConfigError, DataError, Key, Registry
from laconic.data.assignment import Assignment, Examples, IntArray, Ragged, deal, even_sizes, proportional
from laconic.data.dirichlet import dirichlet, dirichlet_per_class, need_classes, pachinko
from laconic.data.foreign import is_foreign_partitioner, load_foreign

PartitionSpec: TypeAlias = str | dict[str, Any] | Any
"""A partition's name, a table `{"kind": name, **settings}`, one's own function, or a `flwr_datasets` partitioner."""


def iid(examples: Examples, clients: int, key: Key, *, remainder: Literal["first", "last"] = "first") -> Assignment:
    """Shuffled and split evenly; what is over goes one each to the first clients, or all to the last.

    >>> iid(Examples(np.zeros(13, np.int64), num_train=11, classes=1), 3, Key.from_seed(0)).train.sizes
    array([4, 4, 3])
    """
    rng = key.fold_in("iid").numpy()

    def split(total: int, start: int) -> Ragged:
        sizes = even_sizes(total, clients)
        if remainder == "last":
            sizes = np.full(clients, total // clients, dtype=np.int64)
            sizes[-1] += total % clients
        return _shuffled(sizes, total, start, rng)

    return Assignment(split(examples.num_train, 0), split(examples.num_test, examples.num_train))


def even(examples: Examples, clients: int, key: Key) -> Assignment:
    """Shuffled and split into parts of exactly equal size; what is over is dropped and reported.

    >>> dealt = even(Examples(np.zeros(13, np.int64), num_train=11, classes=1), 3, Key.from_seed(0))
    >>> dealt.train.sizes, dealt.dropped
    (array([3, 3, 3]), 2)
    """
    rng = key.fold_in("even").numpy()

    def split(total: int, start: int) -> Ragged:
        return _shuffled(np.full(clients, total // clients, dtype=np.int64), total, start, rng)

    train, test = split(examples.num_train, 0), split(examples.num_test, examples.num_train)
    return Assignment(train, test, examples.num_train - len(train.flat))


def label_shards(examples: Examples, clients: int, key: Key, *, shards_per_client: int = 2) -> Assignment:
    """Each class is cut into shards, and every client draws a few of them (McMahan et al., 2017).

    A client has at most `shards_per_client` classes, since a shard has one class only; it may draw the same class
    twice. All classes give the same number of shards. The test set is dealt by the same list of classes.

    >>> examples = Examples(np.arange(1200) % 10, num_train=1000, classes=10)
    >>> dealt = label_shards(examples, 20, Key.from_seed(0))
    >>> max(len(set(examples.labels[rows])) for rows in dealt.train)
    2
    """
    need_classes(examples, "label_shards")
    if shards_per_client < 1:
        raise DataError(f"partition 'label_shards': shards_per_client must be at least 1, got {shards_per_client}.")
    rng = key.fold_in("label_shards").numpy()
    stock = examples.train_stock()
    present = np.flatnonzero(stock)
    shards = np.zeros(examples.classes, dtype=np.int64)
    shards[rng.permutation(present)] = even_sizes(clients * shards_per_client, len(present))
    short = np.flatnonzero(stock < shards)
    if len(short):
        label = int(short[0])
        raise DataError(
            f"partition 'label_shards': {clients} clients with {shards_per_client} shards each need "
            f"{shards[label]} shards of class {label}, which has {stock[label]} examples; "
            "lower clients or shards_per_client."
        )
    drawn = rng.permutation(np.repeat(np.arange(examples.classes), shards))

    def counts(stock: IntArray) -> IntArray:
        table = np.zeros((clients, examples.classes), dtype=np.int64)
        for label in present:
            places = np.flatnonzero(drawn == label)
            if len(places):
                sizes = rng.permutation(even_sizes(int(stock[label]), len(places)))
                np.add.at(table[:, label], places // shards_per_client, sizes)
        return table

    train = deal(counts(stock), examples.train_labels, rng)
    test = deal(counts(examples.test_stock()), examples.test_labels, rng, start=examples.num_train)
    return Assignment(train, test, examples.num_train - len(train.flat))


def sorted_shards(examples: Examples, clients: int, key: Key, *, shards_per_client: int = 10) -> Assignment:
    """All examples in order of their label, cut into shards of equal size, a few shards for every client.

    Test examples are cut into as many shards, and a client gets those of the same numbers. What is over at the
    end is dropped and reported. Ten clients and 15,000 examples give 100 shards of 150 (UCI Adult).

    >>> examples = Examples(np.arange(60) % 2, num_train=40, classes=2)
    >>> dealt = sorted_shards(examples, 4, Key.from_seed(0), shards_per_client=2)
    >>> dealt.train.sizes.tolist(), dealt.test.sizes.tolist()
    ([10, 10, 10, 10], [4, 4, 4, 4])
    """
    need_classes(examples, "sorted_shards")
    if shards_per_client < 1 or clients * shards_per_client > examples.num_train:
        raise DataError(
            f"partition 'sorted_shards': {clients} clients with {shards_per_client} shards each cannot be had "
            f"from {examples.num_train} examples; shards_per_client may be 1 to {examples.num_train // clients}."
        )
    shards = clients * shards_per_client
    rng = key.fold_in("sorted_shards").numpy()
    holder = np.empty(shards, dtype=np.int64)
    holder[rng.permutation(shards)] = np.repeat(np.arange(clients), shards_per_client)

    def cut(labels: IntArray, start: int) -> Ragged:
        size = len(labels) // shards
        owner = np.full(len(labels), -1, dtype=np.int64)
        owner[np.argsort(labels, kind="stable")[: size * shards]] = np.repeat(holder, size)
        return Ragged.from_owner(owner, clients, start=start)

    train = cut(examples.train_labels, 0)
    test = cut(examples.test_labels, examples.num_train)
    return Assignment(train, test, examples.num_train - len(train.flat))


def cmax(examples: Examples, clients: int, key: Key, *, c_max: int = 2, strict: bool = True) -> Assignment:
    """Clients of unequal size with at most `c_max` classes each (Isik et al., 2023, FedPM).

    Sizes are proportional to whole numbers drawn uniformly from 10 to 100. A client picks `c_max` classes at
    random among those that have enough left and takes equally from each; the largest clients choose first.
    Examples that fit nowhere are dropped and reported.

    `strict=False` follows the published code instead: numbers from 10 to 99, consecutive classes from a random
    one on, everything handed out, and therefore more than `c_max` classes wherever a share does not come out
    even or a class has run out. The test set is divided class by class as the training set was.

    >>> examples = Examples(np.arange(1200) % 10, num_train=1000, classes=10)
    >>> dealt = cmax(examples, 10, Key.from_seed(0), c_max=2)
    >>> max(len(set(examples.labels[rows])) for rows in dealt.train)
    2
    >>> int(dealt.train.sizes.sum()) + dealt.dropped
    1000
    """
    need_classes(examples, "cmax")
    if not 1 <= c_max <= examples.classes:
        raise DataError(
            f"partition 'cmax': c_max must be between 1 and the number of classes, {examples.classes}, got {c_max}."
        )
    rng = key.fold_in("cmax").numpy()
    weights = rng.integers(10, 101 if strict else 100, size=clients)
    budgets = np.floor(weights / weights.sum() * examples.num_train).astype(np.int64)
    budgets[-1] += examples.num_train - budgets.sum()
    fill = _few_classes if strict else _consecutive_classes
    counts = fill(budgets, examples.train_stock(), c_max, rng)
    train = deal(counts, examples.train_labels, rng)
    test = deal(proportional(counts, examples.test_stock()), examples.test_labels, rng, start=examples.num_train)
    return Assignment(train, test, examples.num_train - len(train.flat))


def groups(examples: Examples, clients: int | None, key: Key, *, min_size: int = 1) -> Assignment:
    """Natural groups, such as writers: one client each, with all of the group's rows.

    Groups with fewer than `min_size` training examples are left out. Fewer `clients` than groups takes some of
    them at random, and the common test set is then that of the chosen ones.

    >>> examples = Examples(np.zeros(6, np.int64), num_train=4, classes=1, groups=np.array([7, 7, 9, 9, 9, 7]))
    >>> dealt = groups(examples, None, Key.from_seed(0))
    >>> [rows.tolist() for rows in dealt.train], [rows.tolist() for rows in dealt.test]
    ([[0, 1], [2, 3]], [[5], [4]])
    """
    if examples.groups is None:
        raise DataError(
            "partition 'groups' needs natural groups, which this dataset does not have; "
            "use femnist or mnist_by_writer, or give `groups` with your own arrays."
        )
    _, numbers = np.unique(examples.groups, return_inverse=True)
    numbers = numbers.astype(np.int64)
    sizes = np.bincount(numbers[: examples.num_train], minlength=int(numbers.max()) + 1)
    chosen = np.flatnonzero(sizes >= max(min_size, 1))
    if clients is None:
        clients = len(chosen)
    if clients > len(chosen) or not len(chosen):
        raise DataError(
            f"partition 'groups': {clients} clients were asked for, but there are {len(chosen)} groups of at "
            f"least {max(min_size, 1)} training examples; leave clients out to take them all."
        )
    if clients < len(chosen):
        chosen = np.sort(key.fold_in("groups").numpy().choice(chosen, size=clients, replace=False))
    client_of = np.full(len(sizes), -1, dtype=np.int64)
    client_of[chosen] = np.arange(clients)
    owner = client_of[numbers]
    train = Ragged.from_owner(owner[: examples.num_train], clients)
    test = Ragged.from_owner(owner[examples.num_train :], clients, start=examples.num_train)
    return Assignment(train, test, examples.num_train - len(train.flat), common=np.sort(test.flat))


partitions: Registry[Assignment] = Registry(
    "partition",
    [
        iid,
        even,
        dirichlet,
        dirichlet_per_class,
        pachinko,
        label_shards,
        sorted_shards,
        cmax,
        groups,
    ],
)
"""All partitions by name."""


def assign(examples: Examples, *, clients: int | None, partition: PartitionSpec = "iid", seed: int = 0) -> Assignment:
    """Deal examples to clients by a partition, given as a configuration gives it; nobody goes empty.

    The result depends on nothing but the labels, the settings and the seed. `clients=None` is for partitions that
    know how many clients there are: natural groups, functions of one's own, and `flwr_datasets` partitioners.

    >>> examples = Examples(np.arange(1200) % 10, num_train=1000, classes=10)
    >>> assign(examples, clients=4, partition={"kind": "dirichlet", "alpha": 0.3}).train.sizes
    array([250, 250, 250, 250])
    """
    key = Key.from_seed(seed).fold_in("partition")
    if clients is not None and clients < 1:
        raise DataError(f"clients must be at least 1, got {clients}.")
    if clients is not None and clients > examples.num_train:
        raise DataError(
            f"{clients} clients cannot share {examples.num_train} training examples; ask for fewer clients."
        )
    if is_foreign_partitioner(partition):
        dealt = load_foreign(partition, examples, clients, key)
        name = type(partition).__name__
    elif callable(partition):
        dealt, name = partition(examples, clients, key), getattr(partition, "__name__", type(partition).__name__)
    else:
        name, settings = partition_name(partition)
        if clients is None and partitions[name] is not groups and ":" not in name:
            raise DataError(f"partition {name!r} needs the number of clients; set clients.")
        dealt = partitions.build(name, settings, given=(examples, clients, key))
    if not isinstance(dealt, Assignment):
        raise ConfigError(f"partition {name!r} must give a laconic.data.Assignment, got {type(dealt).__name__}.")
    empty = np.flatnonzero(dealt.train.sizes == 0)
    if len(empty):
        raise DataError(
            f"partition {name!r} left client {empty[0]} without training examples"
            + (f", and {len(empty) - 1} more" if len(empty) > 1 else "")
            + f", of {len(dealt.train)}; ask for fewer clients, or another seed."
        )
    return dealt


def partition_name(partition: PartitionSpec) -> tuple[str, dict[str, Any]]:
    """Name and settings of a partition as a configuration writes it.

    >>> partition_name({"kind": "dirichlet", "alpha": 0.3})
    ('dirichlet', {'alpha': 0.3})
    """
    if isinstance(partition, str):
        return partition, {}
    if isinstance(partition, Mapping) and isinstance(partition.get("kind"), str):
        return partition["kind"], {name: value for name, value in partition.items() if name != "kind"}
    raise ConfigError(
        'partition must be a name, a table such as { kind = "dirichlet", alpha = 0.3 }, '
        f"a function or a flwr_datasets partitioner, got {partition!r}."
    )


def _shuffled(sizes: IntArray, total: int, start: int, rng: np.random.Generator) -> Ragged:
    rows = rng.permutation(total).astype(np.int64) + start
    parts = Ragged.from_sizes(sizes)
    return Ragged(rows[: len(parts.flat)], parts.offsets)


def _few_classes(budgets: IntArray, stock: IntArray, c_max: int, rng: np.random.Generator) -> IntArray:
    left = stock.copy()
    counts = np.zeros((len(budgets), len(stock)), dtype=np.int64)
    for client in np.argsort(-budgets, kind="stable"):
        budget = int(budgets[client])
        width = min(c_max, budget)
        if width == 0:
            continue
        shares = even_sizes(budget, width)
        enough = np.flatnonzero(left >= shares[0])
        if len(enough) >= width:
            chosen = rng.choice(enough, size=width, replace=False)
        else:  # the fullest ones, ties at random
            shuffled = rng.permutation(len(left))
            chosen = shuffled[np.argsort(-left[shuffled], kind="stable")][:width]
        taken = np.minimum(shares, left[chosen])
        # What one of the chosen classes cannot give, the others may.
        spare = left[chosen] - taken
        before = np.cumsum(spare) - spare
        taken += np.clip(budget - taken.sum() - before, 0, spare)
        counts[client, chosen] = taken
        left[chosen] -= taken
    return counts


def _consecutive_classes(budgets: IntArray, stock: IntArray, c_max: int, rng: np.random.Generator) -> IntArray:
    left = stock.tolist()
    counts = np.zeros((len(budgets), len(left)), dtype=np.int64)
    starts = rng.integers(len(left), size=len(budgets))
    for client, budget in enumerate(budgets.tolist()):
        share = max(1, budget // c_max)
        label = int(starts[client])
        while budget > 0:
            taken = min(share, left[label], budget)
            counts[client, label] += taken
            left[label] -= taken
            budget -= taken
            label = (label + 1) % len(left)
    return counts
