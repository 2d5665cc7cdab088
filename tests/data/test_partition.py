from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core import ConfigError, DataError
from laconic.data import Assignment, Examples, assign, partitions
from laconic.data.assignment import Ragged, deal, proportional


def make(num_train: int = 2000, num_test: int = 500, classes: int = 10, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    total = num_train + num_test
    return Examples(
        rng.permutation(np.arange(total) % classes),
        num_train,
        classes,
        groups=rng.integers(0, 40, size=total),
        coarse=np.arange(classes) // 2,
    )


def histogram(rows: Ragged, examples: Examples) -> np.ndarray:
    cells = rows.owner * examples.classes + examples.labels[rows.flat]
    return np.bincount(cells, minlength=len(rows) * examples.classes).reshape(len(rows), examples.classes)


def check_laws(dealt: Assignment, examples: Examples, clients: int) -> None:
    train, test = dealt.train, dealt.test
    assert len(train) == len(test) == clients
    used = np.concatenate([train.flat, test.flat])
    assert len(np.unique(used)) == len(used), "disjoint"
    held = int((test.flat < examples.num_train).sum())
    assert len(train.flat) + held + dealt.dropped == examples.num_train, "cover, or a reported drop"
    assert train.sizes.min() >= 1
    assert used.min() >= 0
    assert used.max() < len(examples.labels)
    assert train.flat.max() < examples.num_train


EVERY: list[Any] = [
    "iid",
    {"kind": "iid", "remainder": "last"},
    "even",
    "dirichlet",
    {"kind": "dirichlet", "alpha": 0.05},
    {"kind": "dirichlet", "alpha": 1.0, "per_client": 20},
    {"kind": "dirichlet_per_class", "alpha": 0.5},
    {"kind": "dirichlet_per_class", "alpha": 1.0, "cap": False},
    "pachinko",
    {"kind": "pachinko", "test_fraction": 0.0},
    "label_shards",
    {"kind": "label_shards", "shards_per_client": 3},
    "sorted_shards",
    "cmax",
    {"kind": "cmax", "c_max": 4},
    {"kind": "cmax", "c_max": 4, "strict": False},
    "groups",
]


def test_every_partition_is_tested_here() -> None:
    names = {spec if isinstance(spec, str) else spec["kind"] for spec in EVERY}
    assert names == set(partitions)


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_disjoint_covering_and_nobody_empty(spec: Any) -> None:
    examples = make()
    check_laws(assign(examples, clients=30, partition=spec, seed=3), examples, 30)


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_same_seed_same_result(spec: Any) -> None:
    one, two, other = (assign(make(), clients=30, partition=spec, seed=seed) for seed in (5, 5, 6))
    for name in ("train", "test"):
        assert np.array_equal(getattr(one, name).flat, getattr(two, name).flat)
        assert np.array_equal(getattr(one, name).offsets, getattr(two, name).offsets)
    assert not np.array_equal(one.train.flat, other.train.flat)


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_sixty_thousand_examples_to_a_thousand_clients_within_a_second(spec: Any) -> None:
    rng = np.random.default_rng(0)
    classes = 100 if "pachinko" in str(spec) else 10
    examples = Examples(
        rng.integers(0, classes, 70_000),
        60_000,
        classes,
        groups=rng.integers(0, 1000, 70_000),
        coarse=np.arange(classes) // 5,
    )
    began = time.perf_counter()
    dealt = assign(examples, clients=1000, partition=spec)
    assert time.perf_counter() - began < 1.0
    check_laws(dealt, examples, 1000)


@settings(max_examples=60, deadline=None)
@given(
    num_train=st.integers(1, 300),
    num_test=st.integers(0, 60),
    clients=st.integers(1, 40),
    classes=st.integers(1, 8),
    seed=st.integers(0, 9),
    spec=st.sampled_from(EVERY),
)
def test_laws_hold_or_the_partition_says_why_not(
    num_train: int, num_test: int, clients: int, classes: int, seed: int, spec: Any
) -> None:
    examples = make(num_train, num_test, classes, seed)
    try:
        dealt = assign(examples, clients=clients, partition=spec, seed=seed)
    except DataError:
        return  # it cannot be met; the sentences are checked one by one below
    check_laws(dealt, examples, clients)


def test_iid_sizes() -> None:
    examples = make(103, 21)
    assert assign(examples, clients=10).train.sizes.tolist() == [11] * 3 + [10] * 7
    last = assign(examples, clients=10, partition={"kind": "iid", "remainder": "last"})
    assert last.train.sizes.tolist() == [10] * 9 + [13]
    assert last.test.sizes.tolist() == [2] * 9 + [3]


def test_even_drops_what_is_over() -> None:
    dealt = assign(make(103, 21), clients=10, partition="even")
    assert dealt.train.sizes.tolist() == [10] * 10
    assert dealt.dropped == 3


def test_more_clients_than_test_examples_leaves_some_without_a_test() -> None:
    dealt = assign(make(100, 5), clients=50, partition="iid")
    assert dealt.test.sizes.sum() == 5


class TestDirichlet:
    def test_equal_quotas(self) -> None:
        dealt = assign(make(50_000, 10_000), clients=100, partition={"kind": "dirichlet", "alpha": 0.3})
        assert set(dealt.train.sizes) == {500}
        assert set(dealt.test.sizes) == {100}
        assert dealt.dropped == 0

    def test_large_alpha_is_uniform(self) -> None:
        examples = make(50_000, 0)
        # some examples are left over: the last client of all would have to take whatever remains
        spec = {"kind": "dirichlet", "alpha": 1e6, "per_client": 900}
        shares = histogram(assign(examples, clients=50, partition=spec).train, examples) / 900
        assert abs(shares - 0.1).max() < 0.05

    def test_small_alpha_is_one_class(self) -> None:
        examples = make(50_000, 10_000)
        spec = {"kind": "dirichlet", "alpha": 1e-4, "per_client": 250}
        dealt = assign(examples, clients=100, partition=spec)
        largest = histogram(dealt.train, examples).max(axis=1) / 250
        assert np.median(largest) == 1.0
        assert (largest == 1.0).mean() > 0.8  # where a class runs out, a client has two
        assert dealt.dropped == 25_000

    def test_test_set_has_the_clients_own_mix(self) -> None:
        examples = make(50_000, 10_000)
        spec = {"kind": "dirichlet", "alpha": 0.5, "per_client": 250}
        dealt = assign(examples, clients=100, partition=spec)
        train = histogram(dealt.train, examples) / dealt.train.sizes[:, None]
        test = histogram(dealt.test, examples) / dealt.test.sizes[:, None]
        assert abs(train - test).sum(axis=1).mean() < 0.35
        assert abs(train - np.roll(test, 1, axis=0)).sum(axis=1).mean() > 1.0

    def test_mean_mix_is_the_prior(self) -> None:
        rng = np.random.default_rng(1)
        examples = Examples(rng.choice(3, 30_000, p=[0.6, 0.3, 0.1]), 30_000, 3)
        spec = {"kind": "dirichlet", "alpha": 5.0, "per_client": 10}
        shares = histogram(assign(examples, clients=1000, partition=spec).train, examples) / 10
        assert np.allclose(shares.mean(axis=0), [0.6, 0.3, 0.1], atol=0.03)

    def test_drawing_at_once_is_drawing_one_by_one(self) -> None:
        """Mean counts equal those of the protocol's plain loop, also after classes have run out."""
        from laconic.data.dirichlet import _fill

        mix = np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]])
        stock, quotas = np.array([4, 6, 6]), np.array([6, 6])
        rng = np.random.default_rng(0)
        fast, plain = np.zeros((2, 3)), np.zeros((2, 3))
        repeats = 3000
        for _ in range(repeats):
            fast += _fill(mix, quotas, stock, rng)
            left = stock.copy()
            for client in range(2):
                for _ in range(6):
                    q = np.where(left > 0, mix[client], 0)
                    label = rng.choice(3, p=q / q.sum())
                    plain[client, label] += 1
                    left[label] -= 1
        assert np.allclose(fast / repeats, plain / repeats, atol=0.1)

    def test_impossible_quota(self) -> None:
        with pytest.raises(DataError, match="per_client may be 1 to 66"):
            assign(make(), clients=30, partition={"kind": "dirichlet", "per_client": 67})

    @pytest.mark.parametrize("alpha", [0.0, -1.0])
    def test_alpha_out_of_range(self, alpha: float) -> None:
        with pytest.raises(DataError, match="alpha must be positive"):
            assign(make(), clients=30, partition={"kind": "dirichlet", "alpha": alpha})


class TestDirichletPerClass:
    def test_sizes_are_unequal_and_above_the_minimum(self) -> None:
        spec = {"kind": "dirichlet_per_class", "alpha": 0.3, "min_size": 20}
        sizes = assign(make(), clients=20, partition=spec).train.sizes
        assert sizes.min() >= 20
        assert sizes.max() > 1.5 * sizes.min()

    def test_gives_up_in_one_sentence(self) -> None:
        spec = {"kind": "dirichlet_per_class", "alpha": 0.001, "min_size": 50, "tries": 5}
        with pytest.raises(DataError, match="no draw in 5"):
            assign(make(), clients=30, partition=spec)

    def test_impossible_minimum(self) -> None:
        with pytest.raises(DataError, match="need 3000, but there are 2000"):
            assign(make(), clients=30, partition={"kind": "dirichlet_per_class", "min_size": 100})


class TestPachinko:
    def examples(self) -> Examples:
        return Examples(np.arange(60_000) % 100, 50_000, 100, coarse=np.arange(100) // 5)

    def test_published_sizes(self) -> None:
        dealt = assign(self.examples(), clients=500, partition="pachinko")
        assert set(dealt.train.sizes) == {80}
        assert set(dealt.test.sizes) == {20}
        assert dealt.test.flat.max() < 50_000

    def test_few_coarse_labels_with_all_their_fine_labels(self) -> None:
        examples = self.examples()
        spec = {"kind": "pachinko", "per_client": 50, "test_fraction": 0.0}
        counts = histogram(assign(examples, clients=500, partition=spec).train, examples)
        coarse = counts.reshape(500, 20, 5).sum(axis=2)
        assert (np.sort(coarse, axis=1)[:, -4:].sum(axis=1) / 50).mean() > 0.85
        top = coarse.argmax(axis=1)
        assert (counts.reshape(500, 20, 5)[np.arange(500), top] > 0).mean() > 0.8

    def test_needs_coarse_labels(self) -> None:
        with pytest.raises(DataError, match="needs coarse labels"):
            assign(Examples(np.arange(100) % 5, 100, 5), clients=5, partition="pachinko")


class TestLabelShards:
    def test_at_most_two_classes_and_the_same_for_test(self) -> None:
        rng = np.random.default_rng(0)
        examples = Examples(rng.choice(10, 70_000, p=np.r_[[0.11] * 5, [0.09] * 5]), 60_000, 10)
        dealt = assign(examples, clients=100, partition="label_shards")
        train, test = histogram(dealt.train, examples), histogram(dealt.test, examples)
        assert (train > 0).sum(axis=1).max() == 2
        assert np.array_equal(train > 0, test > 0)
        assert dealt.dropped == 0
        # every class gives 20 shards, so a client's share of a class is 1/20 or 2/20 of it
        assert np.allclose(np.unique(np.rint(20 * train / train.sum(axis=0))), [0, 1, 2])

    def test_too_few_examples_for_the_shards(self) -> None:
        with pytest.raises(DataError, match="lower clients or shards_per_client"):
            assign(make(100, 0), clients=60, partition="label_shards")


class TestSortedShards:
    def test_adult_protocol(self) -> None:
        rng = np.random.default_rng(0)
        examples = Examples((rng.random(30_000) < 0.25).astype(np.int64), 15_000, 2)
        dealt = assign(examples, clients=10, partition="sorted_shards")
        assert set(dealt.train.sizes) == {1500}
        assert set(dealt.test.sizes) == {1500}
        train, test = histogram(dealt.train, examples), histogram(dealt.test, examples)
        assert abs(train - test).max() <= 300  # same shard numbers, so nearly the same labels
        assert (train.min(axis=1) == 0).any() or train[:, 1].std() > 100

    def test_too_many_shards(self) -> None:
        with pytest.raises(DataError, match="shards_per_client may be 1 to 66"):
            assign(make(), clients=30, partition={"kind": "sorted_shards", "shards_per_client": 67})


class TestCmax:
    @pytest.mark.parametrize("c_max", [1, 2, 4, 10])
    @pytest.mark.parametrize("clients", [10, 50])
    def test_never_more_than_c_max_classes(self, c_max: int, clients: int) -> None:
        examples = make(50_000, 10_000)
        for seed in range(5):
            dealt = assign(examples, clients=clients, partition={"kind": "cmax", "c_max": c_max}, seed=seed)
            train, test = histogram(dealt.train, examples), histogram(dealt.test, examples)
            assert (train > 0).sum(axis=1).max() <= c_max
            assert not ((test > 0) & (train == 0)).any()
            # a few large clients with one class each cannot use up ten classes
            assert dealt.dropped <= (0.12 if c_max > 1 else 0.6) * 50_000

    def test_sizes_vary_tenfold_at_most(self) -> None:
        sizes = assign(make(50_000), clients=50, partition={"kind": "cmax", "c_max": 10}).train.sizes
        assert 4 < sizes.max() / sizes.min() < 11

    def test_published_code_hands_out_everything(self) -> None:
        examples = make(50_000)
        spec = {"kind": "cmax", "c_max": 2, "strict": False}
        dealt = assign(examples, clients=10, partition=spec)
        assert dealt.dropped == 0
        assert (histogram(dealt.train, examples) > 0).sum(axis=1).max() > 2

    @pytest.mark.parametrize("c_max", [0, 11])
    def test_c_max_out_of_range(self, c_max: int) -> None:
        with pytest.raises(DataError, match="between 1 and the number of classes, 10"):
            assign(make(), clients=10, partition={"kind": "cmax", "c_max": c_max})


class TestGroups:
    def test_one_client_per_group(self) -> None:
        examples = make()
        assert examples.groups is not None
        dealt = assign(examples, clients=None, partition="groups")
        assert len(dealt.train) == 40
        for client in range(40):
            assert set(examples.groups[dealt.train[client]]) == {client}
            assert set(examples.groups[dealt.test[client]]) <= {client}

    def test_some_of_the_groups(self) -> None:
        examples = make()
        dealt = assign(examples, clients=7, partition="groups")
        assert dealt.common is not None
        assert sorted(dealt.common) == sorted(dealt.test.flat)
        assert dealt.dropped == 2000 - len(dealt.train.flat)

    def test_small_groups_are_left_out(self) -> None:
        examples = Examples(np.zeros(6, np.int64), 6, 1, groups=np.array([0, 0, 0, 1, 2, 2]))
        dealt = assign(examples, clients=None, partition={"kind": "groups", "min_size": 2})
        assert dealt.train.sizes.tolist() == [3, 2]
        assert dealt.dropped == 1

    def test_more_clients_than_groups(self) -> None:
        with pytest.raises(DataError, match="41 clients were asked for, but there are 40 groups"):
            assign(make(), clients=41, partition="groups")

    def test_needs_groups(self) -> None:
        with pytest.raises(DataError, match="needs natural groups"):
            assign(Examples(np.arange(100) % 5, 100, 5), clients=5, partition="groups")


class TestErrors:
    def test_more_clients_than_examples(self) -> None:
        with pytest.raises(DataError, match="101 clients cannot share 100 training examples"):
            assign(make(100), clients=101)

    def test_no_clients(self) -> None:
        with pytest.raises(DataError, match="clients must be at least 1, got 0"):
            assign(make(), clients=0)

    def test_number_of_clients_missing(self) -> None:
        with pytest.raises(DataError, match="needs the number of clients"):
            assign(make(), clients=None, partition="iid")

    @pytest.mark.parametrize(
        "name",
        ["dirichlet", "dirichlet_per_class", "pachinko", "label_shards", "sorted_shards", "cmax"],
    )
    def test_regression_has_no_labels(self, name: str) -> None:
        examples = Examples(np.zeros(100, np.int64), 100, 0)
        with pytest.raises(DataError, match="needs class labels"):
            assign(examples, clients=5, partition=name)

    def test_unknown_partition(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'dirichlet'"):
            assign(make(), clients=5, partition="dirichlett")

    def test_unknown_setting(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'alpha'"):
            assign(make(), clients=5, partition={"kind": "dirichlet", "alpah": 1.0})

    @pytest.mark.parametrize("spec", [5, {"alpha": 1.0}, {"kind": 3}, None])
    def test_no_partition_at_all(self, spec: Any) -> None:
        with pytest.raises(ConfigError, match="partition must be a name, a table"):
            assign(make(), clients=5, partition=spec)


def test_deal_never_gives_more_than_there_is() -> None:
    with pytest.raises(DataError, match="class 0 has 2 examples, but the partition asks for 3"):
        deal(np.array([[3]]), np.zeros(2, np.int64), np.random.default_rng(0))


@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=20))
def test_proportional_uses_the_whole_stock_of_classes_that_occur(table: list[list[int]]) -> None:
    counts, stock = np.array(table), np.array([17, 0, 40])
    shared = proportional(counts, stock)
    assert shared.min() >= 0
    assert np.array_equal(shared.sum(axis=0), np.where(counts.sum(axis=0) > 0, stock, 0))
    assert not ((shared > 0) & (counts == 0)).any()


def test_a_function_of_one_s_own_is_a_partition() -> None:
    def halves(examples: Examples, clients: int | None, key: object) -> Assignment:
        owner = np.arange(len(examples.labels)) % 2
        train, test = np.split(owner, [examples.num_train])
        return Assignment(Ragged.from_owner(train, 2), Ragged.from_owner(test, 2, start=examples.num_train))

    check_laws(assign(make(), clients=None, partition=halves), make(), 2)
    with pytest.raises(ConfigError, match=r"partition '<lambda>' must give a laconic\.data\.Assignment, got list"):
        assign(make(), clients=2, partition=lambda *_: [])
