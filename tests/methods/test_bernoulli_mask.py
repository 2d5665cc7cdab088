"""FedPM and FedMask: frozen weights, scores, counts, masks, and the properties that their specification lists."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.conftest import inside
from torch import Tensor, nn

from laconic import codecs, data, fit
from laconic.codecs import HEADER_BYTES
from laconic.core import (
    ClientInfo,
    ConfigError,
    Key,
    Method,
    PayloadError,
    Population,
    Reply,
    Shared,
    Task,
    Tree,
    bernoulli_names,
    drawn,
    prefixed,
    tree_sha256,
    write_state,
)
from laconic.engine import Agreement, Link, Schedule, Simulation, to_everyone
from laconic.engine.round import receive, send
from laconic.evaluations import EVALUATIONS
from laconic.experiment import make_task
from laconic.methods import BernoulliMask, Solver, fedavg, fedmask, fedpm, methods
from laconic.methods.bernoulli_mask import Layout, ResetSchedule, Scores, binary_entropy, first_thetas, kept
from laconic.methods.solvers import Latent
from laconic.models import assemble, mlp, signed_constants
from laconic.privacy import MaskPrivacy
from laconic.testing import Byzantine, check_method, scaled

KEY = Key.from_seed(3)
ONE = ClientInfo(id=0, round=1, examples=10)
STILL = Solver(optimizer="sgd", lr=1e-30, local_steps=1, batch_size=8)
SHORT = Solver(optimizer="adam", lr=0.1, local_steps=4, batch_size=16)


def _task(hidden: tuple[int, ...] = (12,)) -> Task:
    return Task(lambda: mlp((8, 8), 10, hidden=hidden))


def _bound(method: Method | None = None, task: Task | None = None) -> BernoulliMask:
    return inside((method or fedpm(solver=SHORT)).bind(task or _task()))


def _reply(method: BernoulliMask, server: Tree, mask: Tensor, client: int = 0) -> Reply:
    received = method.broadcast(server, to_everyone(1), KEY)
    return Reply(ClientInfo(client, 1, 10 + client), method.layout.tree(mask), received)


def _after(method: BernoulliMask, server: Tree, masks: list[Tensor]) -> Tree:
    return method.server_update(server, [_reply(method, server, mask, i) for i, mask in enumerate(masks)], KEY)


def _sent(method: BernoulliMask, received: Tree, key: Key = KEY) -> Tensor:
    """The mask that a client of the digits sends, by a codec that draws plainly."""
    update = method.client_update(received, {}, data.digits(clients=10).client(0), ONE, key)
    return method.layout.vector(drawn(update.message, bernoulli_names(method.message_spec(received)), key))


def _theta(method: BernoulliMask, server: Tree) -> Tensor:
    return method.theta(method.broadcast(server, to_everyone(1), KEY))


def _masks(method: BernoulliMask, count: int, probability: float | Tensor = 0.5) -> list[Tensor]:
    size = method.layout.size
    return [torch.rand(size, generator=KEY.fold_in("m", i).torch()) < probability for i in range(count)]


def _simulation(method: Any, *, rounds: int, cohort: int = 10, seed: int = 0, **settings: Any) -> Simulation:
    federation = data.digits(clients=10)
    schedule = Schedule(rounds=rounds, cohort=cohort, eval_every=rounds)
    up, down = (codecs.parse(settings.pop(way, "mask")) for way in ("up", "down"))
    task = make_task(federation, "mlp", settings)
    link = Link(up, down)
    return Simulation(method, task, federation, link, schedule, seed=seed, workers=0, evaluations=EVALUATIONS)


# --- (a) the frozen weights --------------------------------------------------------------------------------------


def test_a_both_parties_have_the_same_weights_from_eight_bytes() -> None:
    server = _bound().init(KEY)
    assert (server["seed"].dtype, server["seed"].numel()) == (torch.int64, 1)
    client = _bound(task=_task())  # another process: nothing but the broadcast is common
    received = _bound().broadcast(server, to_everyone(1), KEY)
    own = client._frozen(received["#seed"])
    assert torch.equal(own, _bound()._frozen(server["seed"]))
    assert torch.equal(own, client.layout.vector(signed_constants(client.task.module, int(server["seed"]), "kaiming")))


def test_a_seeds_have_all_64_bits() -> None:
    seeds = [int(_bound().init(Key.from_seed(s))["seed"]) for s in range(40)]
    assert len(set(seeds)) == 40
    assert min(seeds) < -(2**61)
    assert max(seeds) > 2**61


@pytest.mark.parametrize("made", [fedpm(solver=SHORT), fedmask(solver=SHORT)], ids=lambda made: made.name)
def test_a_no_weight_is_ever_trained(made: Method) -> None:
    method = _bound(made)
    server = method.init(KEY)
    frozen = method._frozen(server["seed"])
    before = tree_sha256({"w": frozen})
    received = method.broadcast(server, ONE, KEY)
    update = method.client_update(received, {}, data.digits(clients=10).client(0), ONE, KEY)
    assert tree_sha256({"w": method._frozen(server["seed"])}) == before
    assert update.fitted is not None
    fitted = method.layout.vector(dict(update.fitted.named_parameters()))
    assert bool(((fitted == frozen) | (fitted == 0)).all())
    assert 0.2 < float((fitted == 0).float().mean()) < 0.8


def test_a_the_first_scores_are_normal_and_from_the_seed() -> None:
    layout = Layout({"a": (400, 300), "b": (7,)})
    theta = first_thetas(17, layout)
    scores = torch.logit(theta.double())
    assert abs(float(scores.mean())) < 4 / math.sqrt(120_000)
    assert abs(float(scores.std()) - 1) < 0.01
    assert float(scores.abs().max()) < 2.9
    assert torch.equal(theta, first_thetas(17, layout))
    assert torch.equal(theta[-7:], first_thetas(17, Layout({"b": (7,)})))
    assert not torch.equal(theta, first_thetas(18, layout))
    assert torch.equal(theta * 2**16, (theta * 2**16).round())
    assert tree_sha256({"theta": theta}) == "736fec5f30c40010e768a7e10ccc7c3f493fbc2a0f0f99eee2193f7760c799d1"


def test_first_scores_that_are_spread_wide_stay_within_what_later_ones_can_be() -> None:
    method = _bound(fedpm(spread=4.0))
    theta, usual = (_theta(bound, bound.init(KEY)) for bound in (method, _bound()))
    assert (float(theta.min()), float(theta.max())) == pytest.approx((0.01, 0.99))
    assert torch.equal(theta > 0.5, usual > 0.5)
    inside = (theta > 0.0101) & (theta < 0.9899)
    torch.testing.assert_close(torch.logit(theta[inside]), 4 * torch.logit(usual[inside]), rtol=0.01, atol=0.01)
    for wrong in (0.0, -1.0, 11.0):
        with pytest.raises(ConfigError, match=r"spread must be 'uniform' or lie in \(0, 10\]"):
            fedpm(spread=wrong)


# --- (c), (d): aggregation ---------------------------------------------------------------------------------------


def test_c_with_lambda0_1_and_a_reset_in_every_round_theta_is_the_shrunk_mean() -> None:
    method = _bound(fedpm(reset=1))
    server = method.init(KEY)
    for _ in range(3):
        masks = _masks(method, 7)
        server = _after(method, server, masks)
        mean = torch.stack(masks).double().mean(dim=0)
        assert torch.allclose(_theta(method, server).double(), 0.01 + 0.98 * mean, atol=1e-7, rtol=0)
        assert int(server["total"]) == 7


def test_c_a_window_of_three_rounds_counts_the_masks_of_three_rounds() -> None:
    method = _bound(fedpm(reset=3))
    server = method.init(KEY)
    totals, means = [], []
    for number in range(7):
        masks = [torch.full((method.layout.size,), number % 2 == 0)] * 4
        server = _after(method, server, masks)
        totals.append(int(server["total"]))
        means.append(round((float(_theta(method, server)[0]) - 0.01) / 0.98, 6))
    assert totals == [4, 8, 12, 4, 8, 12, 4]
    assert means == pytest.approx([1, 1 / 2, 2 / 3, 0, 1 / 2, 1 / 3, 1], abs=1e-6)


@pytest.mark.parametrize("lambda0", [1.0, 1.5, 4.0])
def test_c_theta_is_the_mode_of_the_beta_posterior(lambda0: float) -> None:
    method = _bound(fedpm(lambda0=lambda0, shrink=1e-9, reset=2))
    server = method.init(KEY)
    masks = _masks(method, 5)
    for _ in range(2):
        server = _after(method, server, masks)
    ones = 2 * torch.stack(masks).double().sum(dim=0)
    mode = (lambda0 + ones - 1) / (2 * lambda0 + 10 - 2)
    assert torch.allclose(_theta(method, server).double(), mode, atol=1e-6, rtol=0)
    # Where the density is largest.
    alpha, beta = lambda0 + float(ones[0]), lambda0 + 10 - float(ones[0])
    grid = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    density = (alpha - 1) * grid.log() + (beta - 1) * (1 - grid).log()
    assert float(grid[density.argmax()]) == pytest.approx(float(mode[0].clamp(0.001, 0.999)), abs=1e-3)


def test_a_theta_of_0_or_1_never_reaches_a_client() -> None:
    method = _bound(fedpm(reset=1))
    server = method.init(KEY)
    size = method.layout.size
    server = _after(method, server, [torch.arange(size) % 2 == 0] * 10)
    theta = _theta(method, server)
    assert theta.unique().tolist() == pytest.approx([0.01, 0.99])
    assert float(torch.logit(theta).abs().max()) == pytest.approx(4.595, abs=1e-3)


def test_half_of_the_masks_is_exactly_one_half() -> None:
    method = _bound(fedpm(reset=1, lambda0=1.7, shrink=0.013))
    size = method.layout.size
    server = _after(method, method.init(KEY), [torch.ones(size) > 0, torch.zeros(size) > 0] * 3)
    assert bool((_theta(method, server) == 0.5).all())
    (mask,) = method.masks(server)  # neither kept nor dropped by all: coins, and the same ones everywhere
    assert abs(float(mask.double().mean()) - 0.5) < 4 * math.sqrt(0.25 / size)
    assert torch.equal(mask, method.masks(server)[0])
    other = method.masks({**server, "seed": server["seed"] + 1})[0]
    assert not torch.equal(mask, other)


def test_first_scores_may_be_uniform() -> None:
    method = _bound(fedpm(spread="uniform"), _task((1280,)))
    theta = method.theta(method.broadcast(method.init(KEY), ONE, KEY))
    assert float(theta.double().mean()) == pytest.approx(0.5, abs=0.01)
    assert float(theta.double().var()) == pytest.approx(1 / 12, rel=0.02)
    assert (float(theta.min()), float(theta.max())) == pytest.approx((0.01, 0.99))


def test_a_schedule_begins_with_windows_of_one_round() -> None:
    """Then of three: the masks that θ is made of, round by round."""
    method = _bound(fedpm(reset=ResetSchedule(first=2, then=3)))
    server, totals = method.init(KEY), []
    for _ in range(8):
        server = _after(method, server, _masks(method, 2))
        totals.append(int(server["total"]))
    assert totals == [2, 2, 2, 4, 6, 2, 4, 6]
    written = methods.build("fedpm", {"reset": {"first": 2, "then": 3}})  # as a configuration says it
    assert _bound(written).schedule == ResetSchedule(2, 3)


def test_clients_send_probabilities_unless_privacy_or_fedmask_draws() -> None:
    for made, bernoulli in (
        (fedpm(solver=STILL), True),
        (fedmask(solver=STILL), False),
        (fedpm(solver=STILL, privacy=MaskPrivacy(c=0.2, sigma=1.0)), False),
    ):
        method = _bound(made)
        received = method.broadcast(method.init(KEY), ONE, KEY)
        message = method.client_update(received, {}, data.digits(clients=10).client(0), ONE, KEY).message
        assert all(leaf.is_floating_point() == bernoulli for leaf in message.values())
        assert all(leaf.bernoulli == bernoulli for leaf in method.message_spec(received).values())
        if bernoulli:
            assert _simulation(made, rounds=1, up="mrc").agreement.link.up.text == "mrc"
            continue
        with pytest.raises(ConfigError, match=r"link.up = 'mrc' draws bits from probabilities, but .* sends none"):
            _simulation(made, rounds=1, up="mrc")


def test_candidates_go_up_and_not_down() -> None:
    with pytest.raises(ConfigError, match=r"link.down = 'mrc' draws bits, which only clients send"):
        _simulation(fedpm(), rounds=1, down="mrc")
    with pytest.raises(ConfigError, match=r"link.up = 'mrc' draws bits from probabilities, but fedavg sends none"):
        _simulation(fedavg(), rounds=1, up="mrc")


def test_fewer_bits_by_minimal_random_coding() -> None:
    """The digits, six rounds: it learns nearly as well, for a third of the bits."""
    solver = Solver(optimizer="adam", lr=0.1, local_epochs=3, batch_size=16)
    made = {
        up: fit(data=data.digits(clients=10), method=fedpm(solver=solver), rounds=6, cohort=10, up=up).summary
        for up in ("mask", "mrc")
    }
    assert made["mrc"]["bits_per_parameter_up"] < 0.4 * made["mask"]["bits_per_parameter_up"]
    assert made["mrc"]["global_accuracy"] > made["mask"]["global_accuracy"] - 0.15


def test_each_client_counts_once_whatever_its_examples() -> None:
    method = _bound(fedpm(reset=1))
    server = method.init(KEY)
    masks = _masks(method, 3)
    replies = [_reply(method, server, mask, i) for i, mask in enumerate(masks)]
    large = [replace(reply, client=replace(reply.client, examples=10**6)) for reply in replies[:1]] + replies[1:]
    assert tree_sha256(method.server_update(server, replies, KEY)) == tree_sha256(
        method.server_update(server, large, KEY)
    )


def test_d_the_mean_of_masks_is_unbiased_with_the_error_of_the_formula() -> None:
    """‖θ̂ − mean θ_k‖² over 96,010 parameters: Σ θ(1 − θ)/K², within four standard errors, and below d/4K."""
    method = _bound(fedpm(reset=1, shrink=1e-12), _task((1280,)))
    size, clients = method.layout.size, 5
    thetas = [torch.rand(size, generator=KEY.fold_in("θ", k).torch(), dtype=torch.float64) for k in range(clients)]
    masks = [torch.rand(size, generator=KEY.fold_in("u", k).torch()) < t.float() for k, t in enumerate(thetas)]
    errors = _theta(method, _after(method, method.init(KEY), masks)).double() - torch.stack(thetas).mean(dim=0)
    expected = sum(float((t * (1 - t)).sum()) for t in thetas) / clients**2
    found = float(errors.square().sum())
    assert abs(found - expected) < 4 * float(errors.square().std()) * math.sqrt(size)
    assert found <= size / (4 * clients)
    assert abs(float(errors.sum())) < 4 * math.sqrt(expected)


def test_d_clients_send_draws_of_their_own_theta() -> None:
    method = _bound(fedpm(solver=STILL), _task((300,)))
    server = method.init(KEY)
    received = method.broadcast(server, ONE, KEY)
    theta = method.theta(received).double()
    sent = [_sent(method, received, KEY.fold_in(i)).double() for i in range(3)]
    deviation = math.sqrt(float((theta * (1 - theta)).sum()))
    for mask in sent:
        assert abs(float((mask - theta).sum())) < 4 * deviation
        # Each by itself, too: groups of parameters of about the same θ.
        for part in torch.split(theta.argsort(), 3000):
            p = theta[part]
            assert abs(float((mask[part] - p).sum())) < 4.5 * math.sqrt(float((p * (1 - p)).sum()))
    assert not torch.equal(sent[0], sent[1])


# --- (e) gradients -----------------------------------------------------------------------------------------------


def _gradient(method: BernoulliMask, scores: Tensor, task: Task, x: Tensor, key: Key) -> Tensor:
    """What a mini-batch gives the solver."""
    frozen = method._frozen(method.init(KEY)["seed"])
    posterior = Scores(method, torch.sigmoid(scores), frozen, key)
    stand_ins, draws = posterior.latent.draw([scores])
    loss = torch.func.functional_call(task.module, dict(stand_ins), (x,)).sum()
    learnt = posterior.latent.learn([scores], list(torch.autograd.grad(loss, draws)))
    assert learnt is not None
    return learnt[0]


@pytest.mark.parametrize("ste", ["identity", "theta"])
def test_e_the_gradient_is_exact_where_the_loss_is_linear_in_the_mask(ste: str) -> None:
    task = Task(lambda: nn.Linear(20, 3))
    method = _bound(fedpm(ste=ste), task)
    scores = torch.randn(63, generator=KEY.torch())
    x = torch.randn(5, 20, generator=KEY.fold_in("x").torch())
    leaf = scores.clone().requires_grad_()
    mean = method.layout.tree(torch.sigmoid(leaf) * method._frozen(method.init(KEY)["seed"]))
    (exact,) = torch.autograd.grad(torch.func.functional_call(task.module, mean, (x,)).sum(), leaf)
    if ste == "theta":
        exact = exact * torch.sigmoid(scores)  # the authors' code; not the derivative of an expectation
    for draw in range(3):
        found = _gradient(method, scores, task, x, KEY.fold_in(draw))
        assert torch.allclose(found, exact, rtol=1e-5, atol=1e-6)


def test_e_masks_are_drawn_anew_for_every_mini_batch() -> None:
    method = _bound()
    frozen = method._frozen(method.init(KEY)["seed"])
    theta = torch.full((method.layout.size,), 0.5)
    latent: Latent = Scores(method, theta, frozen, KEY).latent
    assert latent.trained is not None
    first, second = (latent.draw(latent.trained)[1][0] for _ in range(2))
    assert not torch.equal(first, second)
    assert bool(((first == frozen) | (first == 0)).all())


def test_scores_climb_where_a_weight_helps() -> None:
    """One weight, a loss that falls with it: kept if it is positive, dropped if it is negative."""
    task = Task(lambda: nn.Linear(1, 8, bias=False), loss=lambda output, target: -output.mean())
    method = _bound(fedpm(solver=Solver(optimizer="adam", lr=0.3, local_steps=60, batch_size=4)), task)
    server = method.init(KEY)
    ones = data.Federation.from_clients([(np.ones((8, 1), np.float32), np.zeros(8, np.int64))], classes=2).client(0)
    received = method.broadcast(server, ONE, KEY)
    update = method.client_update(received, {}, ones, ONE, KEY)
    positive = method._frozen(server["seed"]) > 0
    assert 0 < int(positive.sum()) < 8
    assert torch.equal(method.layout.vector(update.message) > 0.5, positive)


def test_the_solver_is_the_settings_own() -> None:
    federation = data.digits(clients=10).client(0)
    sent = []
    for solver in (SHORT, replace(SHORT, optimizer="sgd", momentum=0.9, lr=5.0), replace(SHORT, clip_norm=1e-6)):
        method = _bound(fedpm(solver=solver))
        received = method.broadcast(method.init(KEY), ONE, KEY)
        sent.append(tree_sha256(method.client_update(received, {}, federation, ONE, KEY).message))
    assert len(set(sent)) == 3


# --- (g), (i): bits ----------------------------------------------------------------------------------------------


def test_i_the_papers_figure_is_that_of_bits_not_of_shrunk_values() -> None:
    method = _bound(task=_task((200,)))
    size = method.layout.size
    mask = torch.arange(size) < 0.3 * size
    message = method.layout.tree(mask)
    share = float(mask.double().mean())
    bits = 8 * method.paper_bytes({}, message) / size
    assert bits == pytest.approx(binary_entropy(share) + math.log2(size) / size, abs=8 / size)
    assert bits == pytest.approx(0.8813, abs=2e-3)
    assert abs(bits - binary_entropy(0.01 + 0.98 * share)) > 3e-3  # the reference's .8861
    assert method.paper_bytes({}, method.layout.tree(torch.zeros(size) > 0)) == math.ceil(math.log2(size) / 8)


def test_i_where_theta_is_extreme_masks_cost_little_and_the_figure_says_so() -> None:
    method = _bound(fedpm(reset=1, solver=STILL), _task((200,)))
    size = method.layout.size
    server = _after(method, method.init(KEY), [torch.arange(size) % 10 == 0] * 5)
    received = method.broadcast(server, ONE, KEY)
    assert method.theta(received).unique().tolist() == pytest.approx([0.01, 0.99])
    update = method.client_update(received, {}, data.digits(clients=10).client(0), ONE, KEY)
    share = float(method.layout.vector(update.message).double().mean())
    assert update.metrics["ones"] == share
    sent = drawn(update.message, list(update.message), KEY)
    assert update.metrics["mask_entropy"] == binary_entropy(share)
    blob, _ = codecs.mask().encode(sent, Shared.of(method.message_spec(received), KEY, received), {})
    assert update.metrics["mask_cross_entropy"] == pytest.approx(binary_entropy(0.01), rel=0.2)
    assert 8 * len(blob) <= 1.005 * size * update.metrics["mask_cross_entropy"] + 8 * 64
    plain, _ = codecs.mask(model="global").encode(sent, Shared(KEY), {})
    assert 8 * len(plain) / size == pytest.approx(binary_entropy(share), rel=0.02)
    assert len(blob) < len(plain) / 3


def test_what_both_ends_expect_is_theta() -> None:
    method = _bound()
    received = method.broadcast(_after(method, method.init(KEY), _masks(method, 4)), ONE, KEY)
    spec = method.message_spec(received)
    assert all(leaf.dtype == torch.bool and leaf.expected is not None for leaf in spec.values())
    expected = {name: leaf.expected for name, leaf in spec.items() if leaf.expected is not None}
    assert torch.equal(method.layout.vector(expected), method.theta(received))


def test_ten_clients_cost_less_than_36_tenths_of_a_bit_down_and_less_than_one_up() -> None:
    simulation = _simulation(fedpm(reset=1), rounds=4, hidden=[256])
    size = simulation.method.task.spec
    parameters = sum(leaf.size for leaf in size.values())
    records = list(simulation)
    down = [8 * record["bytes_down"] / 10 / parameters for record in records]
    up = [8 * record["bytes_up"] / 10 / parameters for record in records]
    assert down[0] < 0.05  # everybody makes the first θ from the seed
    assert all(bits <= 3.6 for bits in down)
    assert all(bits < 1 for bits in up)
    for bits, record in zip(up, records, strict=True):
        bound = record.clients["mask_cross_entropy"]
        assert bits <= 1.005 * bound + 8 * (64 + HEADER_BYTES) / parameters
    one = _simulation(fedpm(reset=1), rounds=4, up="mask:model=global", hidden=[256])
    for record, other in zip(records, one, strict=True):
        assert record["bytes_up"] <= other["bytes_up"] + 10 * 16
        assert {k: v for k, v in record.items() if k not in ("bytes_up", "seconds")} == {
            k: v for k, v in other.items() if k not in ("bytes_up", "seconds")
        }
    assert records[-1]["bytes_up"] < 0.85 * other["bytes_up"]


# --- learning ----------------------------------------------------------------------------------------------------


def test_it_learns_and_theta_becomes_decided() -> None:
    """A floor far below what it reaches, and far above chance."""
    federation = data.digits(clients=10)
    run = fit(method=fedpm(), data=federation, rounds=12, cohort=10, eval_every=4, workers=0)
    judged = [record for record in run.history if "global_accuracy" in record]
    assert judged[-1]["global_accuracy"] > 0.7
    entropies = [record["mean_entropy"] for record in judged]
    assert entropies == sorted(entropies, reverse=True)
    assert (run.summary["up"], run.summary["down"]) == ("mask", "mask")
    assert run.summary["model_bits_per_parameter"] <= 1
    assert run.summary["bits_per_parameter_up"] < 0.85


# --- FedMask -----------------------------------------------------------------------------------------------------


def test_fedmask_of_one_client_is_that_clients_mask() -> None:
    method = _bound(fedmask(solver=SHORT))
    server = method.init(KEY)
    received = method.broadcast(server, ONE, KEY)
    update = method.client_update(received, {}, data.digits(clients=10).client(0), ONE, KEY)
    new = method.server_update(server, [Reply(ONE, update.message, received)], KEY)
    assert torch.equal(method.masks(new)[0], method.layout.vector(update.message))
    assert update.fitted is not None
    x = data.digits(clients=10).client(0).test.tensors()[0]
    with torch.no_grad():
        assert torch.equal(method.global_model(new)(x), update.fitted.eval()(x))


def test_fedmask_draws_nothing() -> None:
    method = _bound(fedmask(solver=SHORT))
    received = method.broadcast(method.init(KEY), ONE, KEY)
    scores = torch.logit(method.theta(received))
    posterior = Scores(method, method.theta(received), method._frozen(received["#seed"]), KEY)
    for _ in range(2):
        _, (masked,) = posterior.latent.draw([scores])
        assert torch.equal(masked != 0, scores > 0)
    still = _bound(fedmask(solver=STILL))
    update = still.client_update(received, {}, data.digits(clients=10).client(0), ONE, KEY)
    assert torch.equal(still.layout.vector(update.message), scores > 0)


def test_fedmask_costs_a_bit_by_one_frequency() -> None:
    simulation = _simulation(fedmask(), rounds=3, up="mask:model=global", hidden=[256])
    parameters = inside(simulation.method).layout.size
    for record in simulation:
        assert record.clients["mask_entropy"] > 0.999
        assert 0.999 < 8 * (record["bytes_up"] / 10 - HEADER_BYTES) / parameters <= 1 + 16 / parameters


# --- windows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cohort", "period"), [(10, 1), (5, 3), (1, 10), (2, 6)])
def test_auto_takes_the_window_from_the_share_of_clients(cohort: int, period: int) -> None:
    simulation = _simulation(fedpm(solver=STILL), rounds=1, cohort=cohort)
    assert inside(simulation.method).schedule == ResetSchedule(0, period)
    assert inside(_simulation(fedpm(reset=4), rounds=1, cohort=cohort).method).schedule.then == 4
    wrapped = Byzantine(fedpm(), {0}, scaled(1.0))
    assert inside(wrapped.bind(_task(), Population(10, cohort))).schedule.then == period
    assert wrapped.link == ("mask", "mask")


def test_the_link_that_a_method_is_made_for() -> None:
    assert fedpm().link == fedmask().link == ("mask", "mask")
    assert fedavg().link == ("float32", "float32")


# --- the optimizer's memory --------------------------------------------------------------------------------------


def test_moments_go_on_where_they_are_kept() -> None:
    bound = fedpm(persist_optimizer=True, solver=SHORT).bind(_task())
    forgetful = fedpm(solver=SHORT).bind(_task())
    assert (bound.personal, bound.own_model) == (True, True)
    assert (forgetful.personal, forgetful.own_model) == (False, False)
    client = data.digits(clients=10).client(0)
    received = bound.broadcast(bound.init(KEY), ONE, KEY)
    first = bound.client_update(received, bound.init_client(KEY), client, ONE, KEY)
    assert sorted(first.personal) == ["memory/0/exp_avg", "memory/0/exp_avg_sq", "memory/0/step", "own"]
    assert float(first.personal["memory/0/step"]) == 4
    before = tree_sha256(first.personal)
    second = bound.client_update(received, first.personal, client, ONE, KEY)
    assert tree_sha256(first.personal) == before
    assert float(second.personal["memory/0/step"]) == 8
    assert tree_sha256(second.message) != tree_sha256(first.message)
    fresh = forgetful.client_update(received, {}, client, ONE, KEY)
    assert tree_sha256(fresh.message) == tree_sha256(first.message)
    x = client.test.tensors()[0]
    with torch.no_grad():
        assert second.fitted is not None
        assert torch.equal(bound.local_model(received, second.personal)(x), second.fitted.eval()(x))


# --- predictors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluate", ["threshold", "sample", "ensemble"])
@pytest.mark.parametrize("scale", ["e", "kaiming"])
def test_the_artifact_predicts_exactly_as_the_model(evaluate: str, scale: str) -> None:
    made = fedpm(evaluate=evaluate, samples=3, scale=scale)
    method = _bound(made)
    server = _after(method, method.init(KEY), _masks(method, 5, torch.linspace(0, 1, method.layout.size)))
    bound = made.bind(_task())
    assert bound.artifact is not None
    artifact = bound.artifact(server)
    x = torch.randn(6, 8, 8, generator=KEY.torch())
    with torch.no_grad():
        predicted = method.global_model(server)(x)
    assert all(leaf.dtype == torch.bool for leaf in artifact.tree.values())
    if evaluate == "ensemble":
        assert artifact.kind == "masks"
        with torch.no_grad():
            assert torch.equal(assemble(method.task.fresh, artifact)(x), predicted)
        return
    assert artifact.kind == "mask"
    module = method.task.fresh().eval()
    seed, named = artifact.settings["seed"], artifact.settings["scale"]
    assert isinstance(seed, int)
    assert 0 <= seed < 2**64
    frozen = signed_constants(module, seed, named)  # type: ignore[arg-type]
    write_state(module, {name: leaf * artifact.tree[name] for name, leaf in frozen.items()})
    with torch.no_grad():
        assert torch.equal(module(x), predicted)


def test_samples_are_draws_of_theta_and_the_same_everywhere() -> None:
    method = _bound(fedpm(evaluate="ensemble", samples=40, reset=1), _task((300,)))
    server = _after(method, method.init(KEY), _masks(method, 5, torch.linspace(0, 1, method.layout.size)))
    masks = torch.stack(method.masks(server)).double()
    theta = _theta(method, server).double()
    assert torch.equal(masks[3] > 0, method.sampled(server, 3))
    for part in torch.split(theta.argsort(), 2000):
        deviation = math.sqrt(float((theta[part] * (1 - theta[part])).sum()) * 40)
        assert abs(float((masks[:, part] - theta[part]).sum())) < 4.5 * deviation
    assert len({tree_sha256({"m": mask}) for mask in masks}) == 40
    one = replace(method, evaluate="sample")
    assert torch.equal(one.masks(server)[0], method.sampled(server, 0))


def test_the_threshold_is_the_settings_own() -> None:
    size = _bound().layout.size
    for threshold, expected in ((0.5, False), (0.35, True), (0.6, False)):
        method = _bound(fedpm(threshold=threshold, reset=1))
        server = _after(method, method.init(KEY), [torch.full((size,), i < 2) for i in range(5)])  # θ = 0.402
        assert method.masks(server)[0].all() == expected


def test_figures_of_the_server() -> None:
    method = _bound(fedpm(reset=1))
    server = _after(method, method.init(KEY), [torch.arange(method.layout.size) % 4 == 0] * 3)
    figures = method.metrics(server)
    share = math.ceil(method.layout.size / 4) / method.layout.size
    assert figures["kept"] == pytest.approx(share)
    sizes = method.layout.sizes.items()
    by_leaf = sum(figures[f"kept/{name.removesuffix('.weight')}"] * size for name, size in sizes)
    assert by_leaf == pytest.approx(share * method.layout.size)
    assert figures["model_bits_per_parameter"] == pytest.approx(binary_entropy(share))
    assert figures["mean_entropy"] == pytest.approx(binary_entropy(0.01), rel=1e-4)


def test_kept_weights_are_weights_and_the_others_are_zero() -> None:
    found = kept(torch.tensor([1.0, -2.0, -3.0]), torch.tensor([True, True, False]))
    assert found.tolist() == [1.0, -2.0, 0.0]
    assert math.copysign(1, float(found[2])) == 1


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lambda0": 0.99}, "lambda0 must be finite and at least 1"),
        ({"lambda0": math.inf}, "lambda0 must be finite"),
        ({"lambda0": math.nan}, "lambda0 must be finite"),
        ({"shrink": 0.0}, "shrink must lie in (0, 0.5)"),
        ({"shrink": 0.5}, "shrink must lie in (0, 0.5)"),
        ({"threshold": 1.0}, "threshold must lie in (0, 1)"),
        ({"reset": 0}, "reset must be 'auto', a number of rounds, at least 1, or a schedule of such; got 0."),
        ({"reset": ResetSchedule(15, 0)}, "reset must be 'auto', a number of rounds, at least 1, or a schedule"),
        ({"spread": "wide"}, "spread must be 'uniform' or lie in (0, 10], got 'wide'."),
        (
            {"reset": "never"},
            "reset must be 'auto', a number of rounds, at least 1, or a schedule",
        ),
        ({"samples": 0}, "samples must be at least 1, got 0."),
        ({"ste": "thetas"}, "unknown ste 'thetas'; did you mean 'theta'?"),
        ({"scale": "f"}, "unknown scale 'f'"),
        ({"evaluate": "mean"}, "unknown evaluate 'mean'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fedpm(**settings)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("method", ["fedpm", "fedmask"])
def test_a_model_with_normalisation_is_refused_before_anything_runs(method: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(ConfigError, match=f"^{method} .*'2' is of the type BatchNorm1d; use a model without running"):
        fit(method=method, data=data.digits(clients=4), model=net, rounds=1, cohort=2, workers=0)


def test_seeds_that_differ_between_server_and_client_are_caught() -> None:
    server = _simulation(fedpm(), rounds=1, seed=0)
    client = _simulation(fedpm(), rounds=1, seed=1)
    frame, _ = send(server.agreement, server.state.server, to_everyone(1))
    with pytest.raises(PayloadError) as caught:
        receive(client.agreement, frame, to_everyone(1))
    assert caught.value.reason == "fingerprint"
    again: Agreement = _simulation(fedpm(), rounds=1, seed=0).agreement
    assert torch.equal(receive(again, frame, to_everyone(1)).received["#seed"], server.state.server["seed"])


@pytest.mark.parametrize(("total", "value"), [(3, 4), (3, -1), (-1, 0), (2**40, 2)])
def test_counts_that_cannot_be_are_refused(total: int, value: int) -> None:
    method = _bound()
    received = method.broadcast(method.init(KEY), ONE, KEY)
    received = {**received, "#total": torch.tensor([total]), "fc1.bias": torch.full((12,), value, dtype=torch.int32)}
    if total == 2**40:
        assert float(method.theta(received).max()) < 0.02  # large, but it can be; nothing as large is made of it
        return
    with pytest.raises(PayloadError, match="cannot be"):
        method.theta(received)


# --- the laws ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        fedpm(solver=SHORT, reset=2, lambda0=2.0, ste="theta", evaluate="ensemble", samples=2),
        fedpm(solver=SHORT, persist_optimizer=True, evaluate="sample"),
        fedpm(solver=SHORT, privacy=MaskPrivacy(c=0.2, sigma=0.1)),
        fedmask(solver=replace(SHORT, optimizer="sgd", momentum=0.9), persist_optimizer=True),
    ],
    ids=lambda method: method.name,
)
def test_it_keeps_the_laws_over_masks(method: Method) -> None:
    check_method(method, lossy="mask")


def test_prefixes_of_the_state_do_not_meet_the_models_names() -> None:
    method = _bound()
    server = method.init(KEY)
    assert set(prefixed("ones", method.layout.zeros(torch.int32))) <= set(server)
    assert list(method.broadcast_spec(ONE, KEY)) == list(method.broadcast(server, ONE, KEY))


def test_private_masks_come_from_clipped_noisy_probabilities() -> None:
    """Every bit keeps some doubt: with c = 0.3 a client that is sure of a weight still sends the other bit often."""
    digits = data.digits(clients=10)
    private = fedpm(privacy=MaskPrivacy(c=0.3, sigma=0.2))
    plain, noisy = (fit(method=m, data=digits, rounds=4, cohort=10, workers=0, seed=1) for m in (fedpm(), private))
    assert noisy.summary["mean_entropy"] > plain.summary["mean_entropy"]
    assert noisy.summary["bits_per_parameter_up"] > 0.9  # doubt is what cannot be coded away
    assert noisy.summary["epsilon_per_round"] > 0
    bound = _bound(private, make_task(digits, "mlp"))
    server = bound.init(Key.from_seed(0))
    counted = {**bound.broadcast(server, ClientInfo(0, 1, 1), Key.from_seed(0)), "#total": torch.tensor([10])}
    theta = bound.theta(counted)  # all ten clients dropped everything
    assert torch.equal(theta, torch.full_like(theta, 0.3))
