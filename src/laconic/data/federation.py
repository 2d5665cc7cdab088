"""`Federation`: the data of all clients, as row numbers into one pair of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from laconic.core import IGNORED, ClientData, DataError, Key, Newcomer, Part, channels_last
from laconic.data.arrays import ArrayLike, as_inputs, as_targets, check_pair, count_classes
from laconic.data.assignment import Examples, IntArray, Ragged
from laconic.data.holdout import hold_out
from laconic.data.partition import PartitionSpec, assign


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The clients' data: what each trains on, what it tests on, and the common test set.

    All examples lie in one pool `x`, `y`: training rows first, then test rows. Clients and the common test set are
    row numbers, so that a hundred thousand clients cost their indices, and one client is had at once.

    `classes` is 0 for regression, whose targets have the shape (examples, outputs). `dropped` counts training
    examples that the partition left to nobody. `protected` holds protected attributes of every row, where the
    data has them: `federation.protected[part.index]`. `held` are rows to decide by (`with_validation`). `newcomer` says
    how the last client joins later (`joined_later`).

    >>> federation = Federation.from_arrays((np.eye(12), np.arange(12) % 3), clients=2, test_fraction=0.5)
    >>> federation
    Federation(arrays: 2 clients, 6 training and 6 test examples, 3 classes, shape (12,))
    >>> len(federation.client(0).train), federation.label_counts().sum()
    (3, np.int64(6))
    """

    name: str
    x: Tensor
    y: Tensor
    train_rows: Ragged
    test_rows: Ragged
    common: Tensor
    classes: int
    dropped: int = 0
    protected: Tensor | None = None
    held: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    newcomer: Newcomer | None = None

    def __post_init__(self) -> None:
        check_pair(self.x, self.y, where=self.name)
        if not len(self.train_rows):
            raise DataError(f"{self.name} has no clients.")
        if len(self.train_rows) != len(self.test_rows):
            raise DataError(
                f"{self.name} has training rows for {len(self.train_rows)} clients but test rows for "
                f"{len(self.test_rows)}; give both for every client."
            )
        uses = np.zeros(len(self.x), dtype=np.int8)
        for rows in (self.train_rows.flat, self.test_rows.flat, self.common.numpy(), self.held.numpy()):
            if len(rows) and not 0 <= rows.min() <= rows.max() < len(self.x):
                raise DataError(f"{self.name} names rows outside its {len(self.x)} examples.")
        np.add.at(uses, self.train_rows.flat, 1)
        if uses.max(initial=0) > 1:
            raise DataError(f"{self.name} gives example {int(uses.argmax())} to more than one client.")
        tested = np.concatenate([self.test_rows.flat, self.common.numpy()])
        for what, rows in (("test", tested), ("validation", self.held.numpy())):
            if uses[rows].any():
                row = int(rows[uses[rows].argmax()])
                raise DataError(f"{self.name} has example {row} among both training and {what} rows.")

    @classmethod
    def from_arrays(
        cls,
        train: tuple[ArrayLike, ArrayLike],
        test: tuple[ArrayLike, ArrayLike] | None = None,
        *,
        clients: int | None = None,
        partition: PartitionSpec = "iid",
        seed: int = 0,
        test_fraction: float | None = None,
        classes: int | None = None,
        groups: ArrayLike | None = None,
        test_groups: ArrayLike | None = None,
        coarse: ArrayLike | None = None,
        protected: ArrayLike | None = None,
        name: str = "arrays",
    ) -> Federation:
        """A federation from plain tensors or arrays.

        Without `test`, `test_fraction` (0.2) of the examples are held out as the common test set, class by class,
        or group by group where `groups` are given. Bytes become floats in [0, 1]; images are channel-first.
        `groups` has an entry per training example, `test_groups` per test example, `coarse` per class,
        `protected` per training and then per test example.

        >>> x, y = np.random.default_rng(0).random((100, 4)), np.arange(100) % 5
        >>> Federation.from_arrays((x, y), clients=10, partition={"kind": "dirichlet", "alpha": 0.5})
        Federation(arrays: 10 clients, 80 training and 20 test examples, 5 classes, shape (4,))
        """
        x, y = _checked_pair(train, where=f"{name}: train")
        if not len(x):
            raise DataError(f"{name}: train is empty; give at least one example per client.")
        numbers = None if groups is None else _numbered(groups, test_groups, len(x))
        if test is not None:
            if test_fraction is not None:
                raise DataError(f"{name}: give either test or test_fraction, not both.")
            test_x, test_y = _checked_pair(test, where=f"{name}: test")
            _check_alike(x, y, test_x, test_y, name)
            pool_x, pool_y, num_train = torch.cat([x, test_x]), torch.cat([y, test_y]), len(x)
            attributes = None if protected is None else torch.as_tensor(protected)
        else:
            strata = numbers if numbers is not None else _labels(y)
            kept, held = hold_out(
                strata,
                fraction=0.2 if test_fraction is None else test_fraction,
                key=Key.from_seed(seed).fold_in("common_test"),
                every=numbers is not None,
            )
            order = torch.from_numpy(np.concatenate([kept, held]))
            pool_x, pool_y, num_train = x[order], y[order], len(kept)
            numbers = None if numbers is None else numbers[order.numpy()]
            attributes = None if protected is None else torch.as_tensor(protected)[order]
        if numbers is not None and len(numbers) != len(pool_x):
            raise DataError(
                f"{name}: groups and test_groups name {len(numbers)} examples, but there are {len(pool_x)}; "
                "give one group per example, for train and test."
            )
        return pooled(
            name,
            pool_x,
            pool_y,
            num_train=num_train,
            clients=clients,
            partition=partition,
            seed=seed,
            classes=classes,
            groups=numbers,
            coarse=None if coarse is None else np.asarray(coarse, dtype=np.int64),
            protected=attributes,
        )

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[tuple[ArrayLike, ArrayLike]],
        test: tuple[ArrayLike, ArrayLike] | None = None,
        *,
        client_tests: Sequence[tuple[ArrayLike, ArrayLike]] | None = None,
        test_fraction: float | None = None,
        classes: int | None = None,
        seed: int = 0,
        name: str = "clients",
    ) -> Federation:
        """A federation from data that is divided by client already.

        `client_tests` are the clients' own test sets; without them, `test_fraction` of every client's examples is
        held out (0.2, or nothing where `test` is given). `test` is the common test set; without it, the common
        test set is the union of the clients' own.

        >>> parts = [(np.ones((10, 3)) * i, np.full(10, i)) for i in range(4)]
        >>> federation = Federation.from_clients(parts)
        >>> federation, len(federation.client(0).test)
        (Federation(clients: 4 clients, 32 training and 8 test examples, 4 classes, shape (3,)), 2)
        """
        if isinstance(clients, Mapping):
            raise DataError(f"{name}: give a list of pairs (x, y), one per client: list(clients.values()).")
        if not len(clients):
            raise DataError(f"{name}: the list of clients is empty.")
        x, y, sizes = _stacked(clients, where=f"{name}: client")
        if (sizes == 0).any():
            raise DataError(f"{name}: client {int(sizes.argmin())} has no examples; leave such clients out.")
        if client_tests is not None:
            if test_fraction is not None:
                raise DataError(f"{name}: give either client_tests or test_fraction, not both.")
            if len(client_tests) != len(clients):
                raise DataError(
                    f"{name}: {len(clients)} clients but {len(client_tests)} test sets; give one for every client."
                )
            own_x, own_y, own_sizes = _stacked(client_tests, where=f"{name}: test of client")
            _check_alike(x, y, own_x, own_y, name)
            train_rows = Ragged.from_sizes(sizes)
            test_rows = Ragged.from_sizes(own_sizes, start=len(x))
            x, y = torch.cat([x, own_x]), torch.cat([y, own_y])
        else:
            fraction = (0.2 if test is None else 0.0) if test_fraction is None else test_fraction
            owner = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
            key = Key.from_seed(seed).fold_in("client_tests")
            kept, held = hold_out(owner, fraction=fraction, key=key, every=True)
            order = torch.from_numpy(np.concatenate([kept, held]))
            x, y = x[order], y[order]
            train_rows = Ragged.from_sizes(np.bincount(owner[kept], minlength=len(sizes)))
            test_rows = Ragged.from_sizes(np.bincount(owner[held], minlength=len(sizes)), start=len(kept))
        common = torch.from_numpy(test_rows.flat.copy())
        if test is not None:
            test_x, test_y = _checked_pair(test, where=f"{name}: test")
            _check_alike(x, y, test_x, test_y, name)
            common = torch.arange(len(x), len(x) + len(test_x))
            x, y = torch.cat([x, test_x]), torch.cat([y, test_y])
        return cls(name, x, y, train_rows, test_rows, common, count_classes(y, classes))

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.train_rows)

    @property
    def kind(self) -> Literal["classification", "regression"]:
        """What is to be predicted."""
        return "classification" if self.classes else "regression"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def train(self) -> Part:
        """The training examples of all clients, for training in one place."""
        return Part(self.x, self.y, torch.from_numpy(self.train_rows.flat))

    @property
    def test(self) -> Part:
        """The common test set."""
        return Part(self.x, self.y, self.common)

    @property
    def validation(self) -> Part:
        """What was held out of the training examples; empty as a rule."""
        return Part(self.x, self.y, self.held)

    def client(self, client: int) -> ClientData:
        """One client's data."""
        self._check(client)
        return ClientData(
            Part(self.x, self.y, torch.from_numpy(self.train_rows[client]), self.protected),
            Part(self.x, self.y, torch.from_numpy(self.test_rows[client]), self.protected),
        )

    def joined_later(self, *, after: int, others: int = 0) -> Federation:
        """The same, where the last client joins after a round; every round then has it and `others` of the rest."""
        if self.num_clients < 2:
            raise DataError(f"{self.name}: a newcomer needs others that are there before it, but there is one client.")
        return replace(self, newcomer=Newcomer(after, others))

    def channels_last(self) -> Federation:
        """The same data with a pixel's channels side by side in memory: the same up to rounding, and quicker."""
        if self.x.ndim != 4:
            raise DataError(f"{self.name}: channels_last is for images, got examples of shape {self.shape}.")
        return replace(self, x=channels_last(self.x))

    def placed(self, client: int, *, of: int) -> Federation:
        """The data of a single client at its place among `of` clients, of which the others have none here.

        >>> own = Federation.from_clients([(np.ones((10, 3)), np.arange(10) % 2)]).placed(1, of=3)
        >>> [own.examples(client) for client in range(3)]
        [0, 8, 0]
        """
        if self.num_clients != 1:
            raise DataError(
                f"{self.name} has {self.num_clients} clients; only a single one can be placed among others."
            )
        if not 0 <= client < of:
            raise DataError(f"{self.name}: there is no client {client} among {of}; clients are 0 to {of - 1}.")
        none = np.empty(0, dtype=np.int64)
        train, test = (
            Ragged.from_lists([rows[0] if place == client else none for place in range(of)])
            for rows in (self.train_rows, self.test_rows)
        )
        return replace(self, train_rows=train, test_rows=test)

    def examples(self, client: int) -> int:
        """Number of a client's training examples."""
        self._check(client)
        return len(self.train_rows[client])

    def label_counts(self) -> IntArray:
        """Training examples (tokens, where each has a target) of each client (row) and class (column)."""
        if not self.classes:
            raise DataError(f"{self.name} is regression and has no labels to count.")
        owner, labels = self.train_labels()
        counts = np.bincount(owner * self.classes + labels, minlength=self.num_clients * self.classes)
        return counts.reshape(self.num_clients, self.classes)

    def train_labels(self) -> tuple[IntArray, IntArray]:
        """The client and the class of every training example, or of every token that has a target."""
        labels, owner = self.y.numpy()[self.train_rows.flat], self.train_rows.owner
        if labels.ndim > 1:
            counted = labels != IGNORED
            return np.repeat(owner, counted.reshape(len(labels), -1).sum(axis=1)), labels[counted]
        return owner, labels

    def _check(self, client: int) -> None:
        if not 0 <= client < self.num_clients:
            raise DataError(f"{self.name} has no client {client}; its clients are 0 to {self.num_clients - 1}.")

    def __repr__(self) -> str:
        what = f"{self.classes} classes" if self.classes else "regression"
        dropped = f", {self.dropped} dropped" if self.dropped else ""
        return (
            f"Federation({self.name}: {self.num_clients} clients, {len(self.train_rows.flat)} training and "
            f"{len(self.common)} test examples{dropped}, {what}, shape {self.shape})"
        )


def pooled(
    name: str,
    x: Tensor,
    y: Tensor,
    *,
    num_train: int,
    clients: int | None,
    partition: PartitionSpec,
    seed: int,
    classes: int | None = None,
    groups: IntArray | None = None,
    coarse: IntArray | None = None,
    protected: Tensor | None = None,
) -> Federation:
    """A federation from a pool, training rows first: what every source ends with."""
    if clients is not None and (isinstance(clients, bool) or not isinstance(clients, int | np.integer)):
        raise DataError(f"{name}: clients must be a whole number, got {clients!r}.")
    count = count_classes(y, classes)
    if coarse is not None and len(coarse) != count:
        raise DataError(f"{name}: coarse has {len(coarse)} entries, but there are {count} classes.")
    if protected is not None and len(protected) != len(x):
        raise DataError(f"{name}: protected has {len(protected)} rows, but there are {len(x)} examples.")
    # Where every token has a target, an example has no class that a partition could go by.
    pool = Examples(_labels(y), num_train, count if y.dim() == 1 else 0, groups, coarse)
    dealt = assign(pool, clients=clients, partition=partition, seed=seed)
    common = np.arange(num_train, len(x)) if dealt.common is None else dealt.common
    return Federation(name, x, y, dealt.train, dealt.test, torch.from_numpy(common), count, dealt.dropped, protected)


def _labels(y: Tensor) -> IntArray:
    return np.zeros(len(y), dtype=np.int64) if y.is_floating_point() or y.dim() > 1 else y.numpy()


def _checked_pair(pair: tuple[ArrayLike, ArrayLike], *, where: str) -> tuple[Tensor, Tensor]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(f"{where} must be a pair (x, y), got {type(pair).__name__}; give both together: (x, y).")
    x, y = as_inputs(pair[0], where=f"{where} x"), as_targets(pair[1], where=f"{where} y")
    check_pair(x, y, where=where)
    return x, y


def _check_alike(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, name: str) -> None:
    for what, one, other in (("x", x, test_x), ("y", y, test_y)):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise DataError(
                f"{name}: {what} is {one.dtype} of shape {tuple(one.shape[1:])} in train, but {other.dtype} of "
                f"shape {tuple(other.shape[1:])} in test; give both in the same form."
            )


def _stacked(pairs: Sequence[tuple[ArrayLike, ArrayLike]], *, where: str) -> tuple[Tensor, Tensor, IntArray]:
    checked = [_checked_pair(pair, where=f"{where} {i}") for i, pair in enumerate(pairs)]
    first = checked[0]
    for i, (x, y) in enumerate(checked):
        same = x.shape[1:] == first[0].shape[1:] and x.dtype == first[0].dtype
        if not same or y.shape[1:] != first[1].shape[1:] or y.dtype != first[1].dtype:
            raise DataError(
                f"{where} {i} has x of shape {tuple(x.shape[1:])} ({x.dtype}) and y ({y.dtype}), unlike client 0; "
                "give all clients in the same form."
            )
    sizes = np.array([len(x) for x, _ in checked], dtype=np.int64)
    return torch.cat([x for x, _ in checked]), torch.cat([y for _, y in checked]), sizes


def _numbered(groups: ArrayLike, test_groups: ArrayLike | None, num_train: int) -> IntArray:
    named = np.asarray(groups)
    if len(named) != num_train:
        raise DataError(f"groups has {len(named)} entries, but there are {num_train} training examples.")
    if test_groups is not None:
        named = np.concatenate([named, np.asarray(test_groups)])
    return np.unique(named, return_inverse=True)[1].astype(np.int64)
