from __future__ import annotations

import pytest

from laconic.core import ALONE, ConfigError, Key, Newcomer, Population, sample_cohort

KEY = Key.from_seed(0)


def test_cohorts_are_drawn_without_replacement_and_given_in_order() -> None:
    population = Population(20, 6)
    drawn = [population.cohort_of(KEY.fold_in("round", number), round=number) for number in range(1, 40)]
    for cohort in drawn:
        assert cohort == sorted(set(cohort))
        assert len(cohort) == 6
    assert {client for cohort in drawn for client in cohort} == set(range(20))
    assert len({tuple(cohort) for cohort in drawn}) > 30
    again = Population(20, 6).cohort_of(KEY.fold_in("round", 1), round=1)
    assert again == drawn[0] == sample_cohort(KEY.fold_in("round", 1), clients=20, cohort=6)


def test_everybody_needs_no_draw() -> None:
    assert Population(5, 5).cohort_of(KEY, round=1) == [0, 1, 2, 3, 4]
    assert ALONE.cohort_of(KEY, round=7) == [0]


def test_a_newcomer_sits_out_and_then_takes_part_in_every_round() -> None:
    population = Population(6, 4, Newcomer(after=3, others=2))
    assert list(population.settled) == [0, 1, 2, 3, 4]
    for number in range(1, 9):
        cohort = population.cohort_of(KEY.fold_in("round", number), round=number)
        if number <= 3:
            assert cohort == sample_cohort(KEY.fold_in("round", number), clients=5, cohort=4)
        else:
            assert cohort[-1] == 5
            assert cohort[:-1] == sample_cohort(KEY.fold_in("round", number), clients=5, cohort=2)


def test_the_largest_cohort_counts_the_newcomer() -> None:
    assert Population(6, 4).most == 4
    assert Population(6, 1, Newcomer(after=3, others=4)).most == 5
    assert Population(6, 4, Newcomer(after=3, others=1)).most == 4


def test_populations_are_values() -> None:
    assert Population(6, 4) == Population(6, 4) != Population(6, 3)
    assert len({Population(6, 4), Population(6, 4), Population(6, 4, Newcomer(1))}) == 2


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Population(3, 4), "run.cohort is 4, but there are only 3 clients; lower run.cohort or raise"),
        (lambda: Population(4, 4, Newcomer(1)), "run.cohort is 4, but there are only 3 clients; lower run.cohort or"),
        (lambda: Population(4, 2, Newcomer(1, others=4)), "newcomer.others is 4, but there are only 3 others."),
        (lambda: Newcomer(after=-1), "a newcomer's after and others must not be negative, got -1, 0."),
        (lambda: Newcomer(after=1, others=-2), "a newcomer's after and others must not be negative, got 1, -2."),
    ],
)
def test_refusals(made: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made()  # type: ignore[operator]
    assert str(caught.value).startswith(said)
