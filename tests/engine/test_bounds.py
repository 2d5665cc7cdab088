"""How much one reply may count: norms and claims, whatever the method."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

import laconic as lc
from laconic.core import ClientInfo, Leaf, Reply, Tree, on_messages
from laconic.engine import bounds as engine_bounds
from laconic.engine.bounds import ABSURD, RATIO, UNBOUNDED, Bounds, within
from laconic.methods import methods
from laconic.testing import Byzantine

SPEC = {"w": Leaf((4,)), "mean": Leaf((4,), exact=True)}
SHORT = {"lr": 0.1, "local_epochs": 1, "batch_size": 20}


def replies(sizes: Iterable[float], *, name: str = "w", examples: Iterable[int] | None = None) -> list[Reply]:
    """Replies of these norms, from clients that claim so many examples."""
    sizes = list(sizes)
    claims = [100] * len(sizes) if examples is None else list(examples)
    made = enumerate(zip(sizes, claims, strict=True))
    return [Reply(ClientInfo(n, 1, claim), {name: torch.full((4,), size / 2)}, {}) for n, (size, claim) in made]


AUTO = Bounds()


def passed(given: list[Reply], bounds: Bounds = AUTO) -> tuple[list[Reply], list[tuple[int, str]]]:
    refused: list[tuple[int, str]] = []
    kept = list(within(given, bounds, SPEC, lambda client, reason, detail: refused.append((client.id, reason))))
    return kept, refused


def norms(given: list[Reply]) -> list[float]:
    return [float(next(iter(reply.message.values())).norm()) for reply in given]


def test_replies_that_are_like_each_other_pass_untouched() -> None:
    given = replies([1.0, 2.0, 0.1, RATIO * 0.99])
    kept, refused = passed(given)
    assert not refused
    assert all(one is other for one, other in zip(kept, given, strict=True))


def test_a_long_reply_is_cut_to_the_bound_and_keeps_its_direction() -> None:
    kept, refused = passed(replies([1.0, 1.0, 10.0, 1.0]))
    assert not refused
    assert norms(kept) == pytest.approx([1, 1, RATIO, 1])
    assert torch.equal(kept[2].message["w"] / kept[2].message["w"].max(), torch.ones(4))


@pytest.mark.parametrize("name", ["w", "beside/w", "mean"])
def test_an_absurd_reply_is_refused_or_cut_by_what_it_is(name: str) -> None:
    kept, refused = passed(replies([1.0, 1e9, 1.0, 1.0], name=name))
    if name == "w":
        assert (len(kept), refused) == (3, [(1, "norm")])
    else:  # control variates and running statistics may differ more among the honest
        assert not refused
        assert norms(kept)[1] == pytest.approx(ABSURD)


def test_a_number_bounds_every_reply() -> None:
    """The mean then moves by no more than bound / n by any one of them."""
    kept, refused = passed(replies([1.0, 1e9, 0.01]), Bounds(max_norm=0.5))
    assert not refused
    assert norms(kept) == pytest.approx([0.5, 0.5, 0.01])


def test_what_is_no_number_is_left_alone() -> None:
    """Gates, masks and counters: a factor would make numbers of them."""
    gates = torch.tensor([True, False])
    given = [replace(reply, message={"gates": gates, **reply.message}) for reply in replies([1.0, 1.0, 10.0])]
    kept = passed(given)[0][2]
    assert list(kept.message) == ["gates", "w"]
    assert torch.equal(kept.message["gates"], gates)
    assert kept.message["gates"].dtype == torch.bool
    assert norms([Reply(kept.client, {"w": kept.message["w"]}, {})]) == pytest.approx([RATIO])


def test_off_is_any() -> None:
    given = replies([1.0, 1e9, 1.0], examples=[1, 10**7, 1])
    kept, refused = passed(given, UNBOUNDED)
    assert kept == given
    assert not refused


def test_claims_are_capped() -> None:
    claims = [100, 120, 10_000_000, 90]
    assert [reply.client.examples for reply in passed(replies([1.0] * 4, examples=claims))[0]] == [100, 120, 300, 90]
    kept = passed(replies([1.0] * 4, examples=claims), Bounds(max_weight=110.0))[0]
    assert [reply.client.examples for reply in kept] == [100, 110, 110, 90]


def test_two_of_ten_cannot_move_the_median_far() -> None:
    for place in range(9):
        sizes = [1.0] * 10
        sizes[place] = sizes[place + 1] = 1e9
        assert len(passed(replies(sizes))[0]) == 8


def test_clients_that_change_nothing_do_not_make_the_others_absurd() -> None:
    kept, refused = passed(replies([0.0] * 8 + [1.0, 1.2]))
    assert not refused
    assert norms(kept) == pytest.approx([0.0] * 8 + [1.0, 1.2])


def test_no_more_than_a_window_waits() -> None:
    """The memory of a round does not grow with the cohort: later replies are measured by those before them."""
    drawn = 0

    def stream() -> Iterable[Reply]:
        nonlocal drawn
        for reply in replies([1.0] * 500 + [1e9]):
            drawn += 1
            yield reply

    refused: list[int] = []
    kept = within(stream(), Bounds(), SPEC, lambda client, reason, detail: refused.append(client.id))
    next(iter(kept))
    assert drawn <= engine_bounds._WINDOW + 1
    assert len(list(kept)) == 499
    assert refused == [500]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "none"])
def test_bounds_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(lc.ConfigError, match=r"^run\.max_norm must be a positive number, 'auto' or 'off'"):
        Bounds(max_norm=bad)
    with pytest.raises(lc.ConfigError, match=r"run.max_weight"):
        lc.fit(data=lc.data.digits(clients=3), cohort=3, rounds=1, max_weight=0.5)


# --- runs ------------------------------------------------------------------------------------------------------------


def loud(message: Tree) -> Tree:
    return {name: torch.full_like(leaf, 9.9e8) for name, leaf in message.items()}


def run(method: lc.Method, rounds: int = 12, **how: object) -> lc.Run:
    data = lc.data.digits(clients=10)
    return lc.fit(method=method, data=data, rounds=rounds, cohort=10, eval_every=rounds, workers=0, **how)


@pytest.mark.parametrize("name", ["fedavg", "fedopt", "scaffold", "fedsparse"])
def test_one_reply_of_one_round_does_not_ruin_a_run(name: str) -> None:
    """The finding: 9.9e8 once, in round 3. Without the bound the same lie leaves nothing."""
    method = methods.build(name, SHORT)

    def once(message: Tree, client: ClientInfo, key: lc.Key) -> Tree:
        return bomb(message) if (client.id, client.round) == (4, 3) else message

    def bomb(message: Tree) -> Tree:
        return {n: torch.full_like(leaf, 9.9e8) if leaf.is_floating_point() else leaf for n, leaf in message.items()}

    attacked = on_messages(method, client=once)
    clean = run(method).summary["global_accuracy"]
    spoilt = run(attacked)
    assert [(r["client"], r["reason"]) for r in spoilt.history[2]["rejections"]] == [(4, "norm")]
    assert spoilt.summary["global_accuracy"] > clean - 0.05
    assert run(attacked, max_norm="off").summary["global_accuracy"] < clean - 0.3


def test_what_a_refused_client_keeps_and_said_does_not_count() -> None:
    one = run(Byzantine(lc.scaffold(**SHORT), {2}, loud), rounds=2)
    assert one.history[0]["replies"] == 9
    assert one.history[0]["rejected"] == 1


@pytest.mark.parametrize("make", [lc.fedavg, lc.lg_fedavg])
def test_a_claim_of_ten_million_examples_does_not_ruin_a_run(
    make: Callable[..., lc.Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that claims all weight, with a step that no bound on norms sees."""
    from laconic.engine import simulate

    honest = simulate.open_reply

    def claimed(agreement: object, frame: bytes, received: Tree, client: ClientInfo) -> Reply:
        reply = honest(agreement, frame, received, client)  # type: ignore[arg-type]
        if client.id != 3:
            return reply
        turned = {name: -leaf for name, leaf in reply.message.items()}
        return Reply(ClientInfo(3, client.round, 10_000_000), turned, received)

    method = make(weighting="examples", **SHORT)
    metric = "local_accuracy" if make is lc.lg_fedavg else "global_accuracy"
    clean = run(method, 25).summary[metric]
    monkeypatch.setattr(simulate, "open_reply", claimed)
    assert run(method, 25).summary[metric] > clean - 0.15
    assert run(method, 25, max_weight="off").summary[metric] < clean - 0.3
