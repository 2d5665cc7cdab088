"""Robust means: what they give, how many attackers they stand, and where they are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic as lc
from laconic.core import Population, Tree
from laconic.methods.robust import centred_clipping, krum, trimmed_mean
from laconic.testing import Byzantine, scaled, small_federation, small_task, with_nan

RULES: list[dict[str, Any]] = [
    {"rule": "trimmed_mean"},
    {"rule": "krum"},
    {"rule": "krum", "best": 3},
    {"rule": "centred_clipping"},
]


def messages(values: Tensor) -> list[Tree]:
    return [{"a": row[:3], "b": row[3:]} for row in values]


def joined(tree: Tree) -> Tensor:
    return torch.cat([tree["a"], tree["b"]])


def test_without_attackers_a_trimmed_mean_is_the_mean() -> None:
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(trimmed_mean(values, 0), values.sort(dim=0).values.mean(dim=0))


@pytest.mark.parametrize("attackers", [1, 2, 3])
def test_a_trimmed_mean_stays_between_the_honest(attackers: int) -> None:
    """At the bound, n = 2f + 1, whatever the others send."""
    generator = torch.Generator().manual_seed(attackers)
    for size in (1e9, -1e9, 1.0, 0.0):
        honest = torch.randn(attackers + 1, 5, generator=generator)
        hostile = torch.full((attackers, 5), size)
        found = trimmed_mean(torch.cat([hostile, honest]), attackers)
        assert bool((found >= honest.min(dim=0).values).all() and (found <= honest.max(dim=0).values).all())


@pytest.mark.parametrize("attackers", [1, 2, 3])
@pytest.mark.parametrize("best", [1, 2])
def test_krum_takes_honest_replies(attackers: int, best: int) -> None:
    """At the bound, n = 2f + 3, with attackers who agree with each other."""
    honest = torch.randn(attackers + 3, 5, generator=torch.Generator().manual_seed(attackers))
    hostile = torch.full((attackers, 5), 50.0)
    chosen = krum(messages(torch.cat([hostile, honest])), attackers, best)
    assert len(chosen) == best
    assert all(any(torch.equal(joined(one), row) for row in honest) for one in chosen)


def test_krum_is_what_the_paper_says() -> None:
    values = torch.tensor([[0.0], [1.0], [1.5], [10.0], [2.4]]).expand(5, 4)
    # n = 5, f = 1: the two nearest of each. 1.5 has 0.25 + 0.81, the least.
    assert joined(krum(messages(values), 1, 1)[0])[0] == 1.5


def test_centred_clipping_moves_no_further_than_its_radius_lets_it() -> None:
    honest, hostile = torch.zeros(8, 5), torch.full((2, 5), 1e6)
    found = joined(centred_clipping(messages(torch.cat([honest, hostile])), 1.0, 3))
    assert float(found.norm()) <= 3 * 2 / 10 + 1e-6  # iterations × share of attackers × radius
    assert float(joined(centred_clipping(messages(torch.cat([honest, hostile])), None, 3)).norm()) == 0


def test_centred_clipping_with_a_wide_radius_is_the_mean() -> None:
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    found = joined(centred_clipping(messages(values), 1e6, 1))
    torch.testing.assert_close(found, values.mean(dim=0))


@pytest.mark.parametrize("settings", RULES, ids=lambda rule: f"{rule['rule']} {rule.get('best', 1)}")
def test_two_of_ten_who_turn_their_steps_round_do_no_harm(settings: dict[str, Any]) -> None:
    """As long as honest replies, so that no bound on norms sees them."""
    data, how = lc.data.digits(clients=10), {"rounds": 10, "cohort": 10, "eval_every": 10, "workers": 0}
    method = lc.fedrobust(**settings, attackers=2, lr=0.2, local_epochs=2)
    attacked = Byzantine(method, clients={3, 7}, transform=scaled(-2.5))
    honest = lc.fit(method=method, data=data, **how).summary["global_accuracy"]
    assert honest > 0.85
    assert lc.fit(method=attacked, data=data, **how).summary["global_accuracy"] > honest - 0.05


@pytest.mark.parametrize(
    ("settings", "least"), [(RULES[0], 5), (RULES[1], 7), ({"rule": "krum", "best": 6}, 8), (RULES[3], 5)]
)
def test_more_attackers_than_a_rule_stands_are_refused(settings: dict[str, Any], least: int) -> None:
    method = lc.fedrobust(**settings, attackers=2)
    method.bind(small_task(), Population(20, least))
    with pytest.raises(lc.ConfigError, match=f"in a cohort of {least} or more, got run.cohort = {least - 1}"):
        method.bind(small_task(), Population(20, least - 1))


def test_a_round_with_too_few_replies_is_abandoned_and_the_run_goes_on() -> None:
    method = Byzantine(lc.fedrobust(attackers=2, lr=0.1, batch_size=10), {0, 1}, with_nan)
    simulation = lc.engine.Simulation(
        method,
        small_task(),
        small_federation(),
        lc.engine.Link(lc.codecs.parse("float32"), lc.codecs.parse("float32")),
        lc.engine.Schedule(rounds=4, cohort=5),
        seed=1,
        workers=0,
    )
    before = lc.core.tree_sha256(simulation.state.server)
    records = list(simulation)
    said = "replies, but trimmed_mean stands 2 attackers among 5 or more"
    assert {record.abandoned[2:] for record in records if record.abandoned} == {said}
    assert all(bool(record.abandoned) == (record["replies"] < 5) for record in records)
    if all(record.abandoned for record in records):
        assert lc.core.tree_sha256(simulation.state.server) == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attackers": -1}, "attackers must be at least 0, got -1"),
        ({"best": 0}, "best must be at least 1, got 0"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"radius": 0.0}, "radius must be positive and finite, got 0.0"),
        ({"rule": "bulyan"}, "unknown rule 'bulyan'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(lc.ConfigError, match=said):
        lc.fedrobust(**settings)


def test_a_median_that_is_weighted_by_claims_warns() -> None:
    with pytest.warns(RuntimeWarning, match="takes the clients' word"):
        lc.fedmedian(weighting="examples")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lc.fedmedian()
