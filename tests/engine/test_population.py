from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core import Key, sample_cohort


@settings(deadline=None)
@given(st.integers(1, 300), st.data(), st.integers(0, 2**63))
def test_without_replacement_in_ascending_order(clients: int, data: st.DataObject, seed: int) -> None:
    size = data.draw(st.integers(1, clients))
    cohort = sample_cohort(Key.from_seed(seed), clients=clients, cohort=size)
    assert len(cohort) == size
    assert cohort == sorted(set(cohort))
    assert 0 <= cohort[0] <= cohort[-1] < clients
    assert all(type(client) is int for client in cohort)


def test_golden_cohorts() -> None:
    """Who takes part is part of a run's numbers: a change of these lines is a change of every result."""
    key = Key.from_seed(0)
    assert sample_cohort(key.fold_in("round", 1), clients=100, cohort=10) == [4, 20, 21, 28, 36, 44, 61, 63, 67, 81]
    assert sample_cohort(key.fold_in("round", 2), clients=100, cohort=10) == [3, 4, 15, 24, 46, 66, 76, 86, 98, 99]
    assert sample_cohort(Key.from_seed(1).fold_in("round", 1), clients=5, cohort=2) == [1, 4]
    assert sample_cohort(key.fold_in("round", 1), clients=10**6, cohort=3) == [221645, 393735, 700709]


def test_the_same_key_gives_the_same_cohort_and_another_key_another_one() -> None:
    draws = [tuple(sample_cohort(Key.from_seed(0).fold_in(i), clients=50, cohort=10)) for i in (1, 1, 2, 3)]
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


@pytest.mark.parametrize(("clients", "cohort"), [(20, 5), (20, 15), (1000, 10)])
def test_every_client_is_as_likely_as_every_other(clients: int, cohort: int) -> None:
    draws = 40_000 // cohort
    counts = np.zeros(clients)
    for i in range(draws):
        counts[sample_cohort(Key.from_seed(7).fold_in(i), clients=clients, cohort=cohort)] += 1
    p = cohort / clients
    # Σ (n_i − np)² / np(1 − p) has mean `clients` and a deviation of about √(2 clients).
    chi_square = float(((counts - draws * p) ** 2).sum() / (draws * p * (1 - p)))
    assert abs(chi_square - clients) < 4 * np.sqrt(2 * clients)


def test_pairs_are_as_likely_as_each_other() -> None:
    """Uniform over cohorts, not only over clients: a rotation of a fixed pattern would pass the test above."""
    clients, draws = 6, 6000
    together = np.zeros((clients, clients))
    for i in range(draws):
        a, b = sample_cohort(Key.from_seed(3).fold_in(i), clients=clients, cohort=2)
        together[a, b] += 1
    pairs = together[np.triu_indices(clients, 1)]
    expected = draws / len(pairs)
    assert ((pairs - expected) ** 2 / expected).sum() < len(pairs) + 4 * np.sqrt(2 * len(pairs))
