"""FedSparse: gates, messages, M-step, and the properties that its specification lists as (a) to (i)."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.methods.conftest import inside
from torch import Tensor, nn

from laconic import codecs, data, fit
from laconic.core import (
    ClientInfo,
    ConfigError,
    Key,
    Method,
    Reply,
    Shared,
    Task,
    Tree,
    num_values,
    read_state,
    resolve,
    spec_of,
    subtree,
)
from laconic.engine import Link, Schedule, Simulation, to_everyone
from laconic.evaluations import EVALUATIONS
from laconic.experiment import make_task
from laconic.methods import ServerOptimizer, Solver, SpikeSlab, fedopt, fedsparse
from laconic.methods.spike_slab import GatePosterior, hard, hard_slope, inverse_softplus
from laconic.models import initialize, lenet5_fs, mlp, num_parameters, resnet20_gn

KEY = Key.from_seed(3)
ONE = ClientInfo(id=0, round=1, examples=10)
SHORT = Solver(lr=0.1, local_steps=3, batch_size=8)


FLOAT32 = codecs.parse("float32")


def _task(hidden: tuple[int, ...] = (12,)) -> Task:
    return Task(lambda: mlp((8, 8), 10, hidden=hidden), initialize=initialize)


def _bound(method: Method | None = None, task: Task | None = None) -> SpikeSlab:
    return inside((method or fedsparse(solver=SHORT)).bind(task or _task()))


def _reply(method: SpikeSlab, server: Tree, gates: Tensor, deltas: Tree | None = None, client: int = 0) -> Reply:
    """A reply with given gates, over all alive gates, and differences."""
    received = method.broadcast(server, to_everyone(1), KEY)
    opened = torch.zeros_like(server["alive"])
    opened[server["alive"]] = gates
    if deltas is None:
        deltas = {name: torch.zeros(leaf.shape) for name, leaf in method.task.spec.items()}
    message = {"#gates": gates, **method._packed(deltas, opened)}
    return Reply(ClientInfo(client, 1, 10), message, received)


def _simulation(method: Method, *, rounds: int, seed: int = 0, workers: int = 0, model: str = "mlp") -> Simulation:
    federation = data.digits(clients=10)
    schedule = Schedule(rounds=rounds, cohort=4, eval_every=rounds)
    task = make_task(federation, model, {})
    link = Link(FLOAT32, FLOAT32)
    return Simulation(method, task, federation, link, schedule, seed=seed, workers=workers, evaluations=EVALUATIONS)


# --- (a) to (i) ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "net", [lambda: lenet5_fs((3, 32, 32), 10), lambda: resnet20_gn((3, 32, 32), 10), lambda: mlp((8, 8), 10)]
)
def test_a_every_gate_begins_at_theta_099(net: object) -> None:
    method = _bound(fedsparse(), Task(net, initialize=initialize))  # type: ignore[arg-type]
    theta = method.margins(method.init(KEY))["theta"]
    assert torch.allclose(theta, torch.full_like(theta, 0.99), atol=1e-6, rtol=0)


def test_a_tiny_groups_get_the_smallest_threshold() -> None:
    method = _bound(fedsparse(structured=False))
    server = method.init(KEY)
    margins, norms = method.margins(server), method.groups.norms(subtree("w", server), torch.float64)
    small = norms < 1e-3 * math.log(99)
    assert bool(small.any())
    assert not bool(small.all())
    assert torch.allclose(margins["theta"][~small], torch.tensor(0.99, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.allclose(F.softplus(server["v"][small]), torch.tensor(1e-6, dtype=torch.float64), rtol=1e-3, atol=0)


@pytest.mark.parametrize("lambda_", [0.0, 0.5])
def test_b_gate_terms_send_nothing_into_the_weights(lambda_: float) -> None:
    """With a likelihood that doesn't depend on the weights, only thresholds learn."""
    task = replace(_task(), loss=lambda output, target: (output * 0).sum())
    method = _bound(fedsparse(lambda0=0.1, xi=0.1, lambda_=lambda_, solver=SHORT), task)
    server = method.init(KEY)
    received = method.broadcast(server, ONE, KEY)
    update = method.client_update(received, {}, data.digits(clients=10).client(0), ONE, KEY)
    assert not any(bool(leaf.any()) for name, leaf in update.message.items() if name != "#gates")
    assert update.metrics["mean_pi"] < 0.98


def test_b_gradient_of_the_thresholds_is_that_of_the_written_loss() -> None:
    """What is computed in closed form equals autograd of NLL and penalties, w's included where λ > 0."""
    task = _task()
    method = _bound(fedsparse(lambda0=2e-3, lambda_=0.7, xi=0.02, temperature=0.5), task)
    server = method.init(KEY)
    start, module = subtree("w", server), task.module
    margins = 0.4 * torch.randn(method.groups.count, generator=KEY.torch())
    posterior = GatePosterior.at(method, start, margins, KEY)
    moved = {name: leaf + 0.05 * torch.randn(leaf.shape, generator=KEY.torch()) for name, leaf in start.items()}
    task.load(moved)
    weights: list[Tensor] = list(module.parameters())
    stand_ins, draws = posterior.latent.draw(weights)
    x, y = torch.randn(6, 8, 8, generator=KEY.torch()), torch.arange(6)
    nll = F.cross_entropy(torch.func.functional_call(module, stand_ins, (x,)), y)
    gradients = list(torch.autograd.grad(nll, [*weights, *draws]))
    found: list[Tensor] = []
    posterior._step = lambda gradient: found.append(gradient)
    with torch.no_grad():
        posterior.latent.learn(weights, gradients[len(weights) :])
        assert posterior.pull is not None
        assert posterior.pull.gradient is not None
        posterior.pull.gradient(weights, gradients)

    own = {name: leaf.clone().requires_grad_() for name, leaf in moved.items()}
    v = posterior.v.clone().requires_grad_()
    uniform = torch.rand(len(v), generator=KEY.fold_in("gates").torch()).clamp(1e-6, 1 - 1e-6)
    log_alpha = (own["fc1.weight"].norm(dim=1).detach() - F.softplus(v)) / 0.5
    gates = (torch.sigmoid((torch.logit(uniform) + log_alpha) * 1.5) * 1.2 - 0.1).clamp(0, 1)
    opening = torch.sigmoid(log_alpha - 2 / 3 * math.log(0.1 / 1.1))
    gated = {**own, "fc1.weight": own["fc1.weight"] * gates[:, None], "fc1.bias": own["fc1.bias"] * gates}
    theta = torch.sigmoid(margins / 0.5)
    drift = (own["fc1.weight"] - start["fc1.weight"]).square().sum(dim=1)
    loss = F.cross_entropy(torch.func.functional_call(module, gated, (x,)), y)
    loss = loss + 0.35 * (opening * drift).sum() + 2e-3 * 64 * opening.sum()
    loss = loss - 0.02 * (opening * theta.log() + (1 - opening) * (1 - theta).log()).sum()
    *of_weights, of_v = torch.autograd.grad(loss, [*own.values(), v])
    assert torch.allclose(found[0], of_v, rtol=1e-4, atol=1e-6)
    # The written loss lets R depend on v only, so that the drift's gradient in w is λ R (w_s − w).
    for computed, written in zip(gradients, of_weights, strict=False):
        assert torch.allclose(computed, written, rtol=1e-4, atol=1e-6)


def test_c_server_gradient_of_v_is_that_of_the_gates_likelihood() -> None:
    method = _bound(fedsparse(temperature=0.1, prune=False, thresholds=ServerOptimizer("sgd", lr=1.0)))
    server = method.init(KEY)
    gates = [torch.rand(12, generator=KEY.fold_in(i).torch()) < 0.6 for i in range(3)]
    new = method.server_update(server, [_reply(method, server, g, client=i) for i, g in enumerate(gates)], KEY)
    v = server["v"].clone().requires_grad_()
    theta = torch.sigmoid((method.groups.norms(subtree("w", server), torch.float64) - F.softplus(v)) / 0.1)
    likelihood = sum((z * theta.log() + ~z * (1 - theta).log()).sum() for z in gates) / 3
    assert isinstance(likelihood, Tensor)
    assert torch.allclose(new["v"] - server["v"], torch.autograd.grad(likelihood, v)[0])


@pytest.mark.parametrize("opened", [True, False])
def test_d_open_gates_lower_the_threshold_and_closed_ones_raise_it(opened: bool) -> None:
    method = _bound(fedsparse(prune=False))
    server = method.init(KEY)
    gates = torch.full((12,), opened)
    new = method.server_update(server, [_reply(method, server, gates, client=i) for i in range(3)], KEY)
    before, after = F.softplus(server["v"]), F.softplus(new["v"])
    assert bool((after < before).all() if opened else (after > before).all())
    theta = method.margins(new)["theta"] - method.margins(server)["theta"]
    assert bool((theta > 0).all() if opened else (theta < 0).all())


@pytest.mark.parametrize("log_alpha", [-2.0, 0.0, 1.5, math.log(99)])
def test_e_gates_are_open_as_often_as_the_formula_says(log_alpha: float) -> None:
    draws = 200_000
    uniform = torch.rand(draws, generator=KEY.torch()).clamp(1e-6, 1 - 1e-6)
    gates = hard(torch.sigmoid((torch.logit(uniform) + log_alpha) / (2 / 3)))
    expected = 1 / (1 + math.exp(-(log_alpha - 2 / 3 * math.log(0.1 / 1.1))))
    error = 3 * math.sqrt(expected * (1 - expected) / draws)
    assert abs(float((gates > 0).double().mean()) - expected) < error
    if log_alpha > 4:  # the specification's figures
        assert abs(1 - expected - 0.00204) < 5e-6
        assert abs(float((gates == 1).double().mean()) - 0.9524) < 3 * math.sqrt(0.9524 * 0.0476 / draws)


def test_f_without_gates_and_penalties_it_is_fedadam_bit_for_bit() -> None:
    server = ServerOptimizer("adam", lr=0.01)
    sparse = _simulation(fedsparse(lambda0=0.0, xi=0.0, gates="open", server=server, solver=SHORT), rounds=4)
    plain = _simulation(fedopt(server=server, solver=SHORT), rounds=4)
    for ours, theirs in zip(sparse, plain, strict=True):
        assert ours.clients["train_loss"] == theirs.clients["train_loss"]
        ours_now, theirs_now = subtree("w", sparse.state.server), subtree("w", plain.state.server)
        assert all(torch.equal(ours_now[name], leaf) for name, leaf in theirs_now.items())
    assert ours["global_accuracy"] == theirs["global_accuracy"]
    assert ours["local_accuracy"] == theirs["local_accuracy"]


def test_f_the_closed_form_is_fedavg_as_well() -> None:
    sparse = _simulation(fedsparse(lambda0=0.0, xi=0.0, gates="open", server=None, solver=SHORT), rounds=3)
    plain = _simulation(fedopt(server=ServerOptimizer("sgd", lr=1.0), solver=SHORT), rounds=3)
    for _ in zip(sparse, plain, strict=True):
        ours, theirs = subtree("w", sparse.state.server), subtree("w", plain.state.server)
        assert all(torch.allclose(ours[name], leaf, atol=1e-6) for name, leaf in theirs.items())


def test_g_the_dead_stay_dead_and_cost_nothing() -> None:
    method = fedsparse(lambda0=3e-3, solver=Solver(lr=0.1, local_epochs=1, batch_size=10))
    simulation = _simulation(method, rounds=8)
    alive, cost = torch.ones(64, dtype=torch.bool), math.inf
    for record in simulation:
        server = simulation.state.server
        assert not bool((server["alive"] & ~alive).any())
        assert not bool(server["w/fc1.weight"][~server["alive"]].any())
        assert not bool(server["w/fc1.bias"][~server["alive"]].any())
        assert record["bytes_down"] <= cost
        alive, cost = server["alive"].clone(), record["bytes_down"]
        assert not record["rejected"]
    assert 0 < int(alive.sum()) < 64


def test_g_bytes_fall_with_every_dead_group() -> None:
    method = _bound()
    server = method.init(KEY)
    costs = []
    for dead in range(12):
        server["alive"] = torch.arange(12) >= dead
        blob, _ = FLOAT32.encode(method.broadcast(server, ONE, KEY), Shared(KEY), {})
        costs.append(len(blob))
    assert [a - b for a, b in itertools.pairwise(costs)] == [4 * (64 + 1 + 1)] * 11


@pytest.mark.parametrize("net", [lambda: lenet5_fs((3, 32, 32), 10), lambda: resnet20_gn((3, 32, 32), 100)])
def test_h_an_all_alive_round_is_4_bytes_per_value_and_bitmaps(net: object) -> None:
    task = Task(net, initialize=initialize)  # type: ignore[arg-type]
    method = _bound(fedsparse(gates="open", solver=Solver(local_steps=1)), task)
    count, size = method.groups.count, num_values(method.task.spec)
    received = method.broadcast(method.init(KEY), ONE, KEY)
    down, _ = FLOAT32.encode(received, Shared(KEY), {})
    everything = torch.ones(count, dtype=torch.bool)
    message = {"#gates": everything, **method._packed(subtree("w", method.init(KEY)), everything)}
    up, _ = FLOAT32.encode(message, Shared(KEY), {})
    assert len(down) + len(up) == 4 * (2 * size + count) + 2 * math.ceil(count / 8)
    assert method.paper_bytes(received, message) == 8 * size


def test_messages_are_as_long_as_the_formulas_say() -> None:
    """ceil(G/8) + 4(d_alive + G_alive + d_free) down, ceil(G_alive/8) + 4(d_z + d_free) up."""
    method = _bound(task=Task(lambda: lenet5_fs((1, 28, 28), 62), initialize=initialize))
    server = method.init(KEY)
    alive = torch.rand(608, generator=KEY.torch()) < 0.7
    server["alive"] = alive
    rows = {"conv1": 25 + 1, "conv2": 800 + 1, "fc1": 1024 + 1}
    free = 512 * 62 + 62

    def held(opened: Tensor) -> int:
        return sum(int(opened[layer.gates].sum()) * rows[layer.name] for layer in method.groups.layers)

    received = method.broadcast(server, ONE, KEY)
    down, _ = FLOAT32.encode(received, Shared(KEY), {})
    assert len(down) == 608 // 8 + 4 * (held(alive) + int(alive.sum()) + free)
    opened = alive & (torch.rand(608, generator=KEY.fold_in(1).torch()) < 0.6)
    message = {"#gates": opened[alive], **method._packed(subtree("w", server), opened)}
    up, _ = FLOAT32.encode(message, Shared(KEY), {})
    assert len(up) == math.ceil(int(alive.sum()) / 8) + 4 * (held(opened) + free)
    assert method.paper_bytes(received, message) == 4 * (held(alive) + held(opened) + 2 * free)
    # The receiver computes the same lengths from the bits.
    bits = {"#alive": alive}
    assert resolve(method.broadcast_spec(ONE, KEY), bits) == spec_of(received)
    assert list(method.broadcast_spec(ONE, KEY)) == list(received)
    assert resolve(method.message_spec(received), {"#gates": opened[alive]}) == spec_of(message)
    assert list(method.message_spec(received)) == list(message)


def test_i_one_sample_gradients_are_unbiased_and_the_closed_form_is_not() -> None:
    """Two clients, one weight: π = (0.9, 0.2), w_s = (1, 3), all outcomes with their probabilities."""
    task = Task(lambda: nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)))
    method = _bound(fedsparse(prune=False, server=ServerOptimizer("sgd", lr=1.0)), task)
    server = {**method.init(KEY), "w/0.weight": torch.full((2, 1), 0.5)}
    gradient = closed = 0.0
    for z in itertools.product([False, True], repeat=2):
        chance = math.prod(p if open_ else 1 - p for p, open_ in zip((0.9, 0.2), z, strict=True))
        replies = []
        for i, (local, open_) in enumerate(zip((1.0, 3.0), z, strict=True)):
            deltas = {"0.weight": torch.full((2, 1), local - 0.5), "1.weight": torch.zeros(1, 2)}
            replies.append(_reply(method, server, torch.tensor([open_, True]), deltas, client=i))
        stepped = method.server_update(server, replies, KEY)
        gradient += chance * 2 * float(stepped["w/0.weight"][0] - 0.5)
        shut = replace(method, server=None).server_update(server, replies, KEY)
        closed += chance * float(shut["w/0.weight"][0]) if any(z) else 0.0
    assert gradient == pytest.approx(0.9 * 0.5 + 0.2 * 2.5, abs=1e-6)
    assert closed / (1 - 0.1 * 0.8) == pytest.approx(1.239, abs=5e-4)
    stationary = (0.9 * 1 + 0.2 * 3) / (0.9 + 0.2)
    assert stationary == pytest.approx(1.364, abs=5e-4)


# --- server ----------------------------------------------------------------------------------------------------------


def test_closed_form_is_the_mean_over_senders_and_keeps_what_nobody_sent() -> None:
    method = _bound(fedsparse(server=None, prune=False))
    server = method.init(KEY)
    first, second = torch.arange(12) < 8, torch.arange(12) < 4
    deltas = {name: torch.full(leaf.shape, 3.0) for name, leaf in method.task.spec.items()}
    twice = {name: 2 * leaf for name, leaf in deltas.items()}
    new = method.server_update(
        server, [_reply(method, server, first, deltas), _reply(method, server, second, twice)], KEY
    )
    moved = (new["w/fc1.weight"] - server["w/fc1.weight"])[:, 0]
    assert torch.allclose(moved, torch.tensor([4.5] * 4 + [3.0] * 4 + [0.0] * 4))
    assert torch.allclose(new["w/fc2.bias"] - server["w/fc2.bias"], torch.tensor(4.5))
    theta = method.margins(new)["theta"]
    expected = torch.tensor([1.0] * 4 + [0.5] * 4 + [0.0] * 4, dtype=torch.float64)
    assert torch.allclose(theta, expected, atol=1e-5)


def test_momentum_does_not_bring_back_the_dead() -> None:
    method = _bound()
    server = method.init(KEY)
    deltas = {name: torch.ones(leaf.shape) for name, leaf in method.task.spec.items()}
    server = method.server_update(server, [_reply(method, server, torch.ones(12, dtype=torch.bool), deltas)], KEY)
    server["v"][3] += 10.0  # far above its norm
    server = method.server_update(server, [_reply(method, server, torch.ones(12, dtype=torch.bool), deltas)], KEY)
    assert server["alive"].tolist() == [i != 3 for i in range(12)]
    after = method.server_update(server, [_reply(method, server, torch.ones(11, dtype=torch.bool))], KEY)
    assert not bool(after["w/fc1.weight"][3].any())
    assert not bool(after["w/fc1.bias"][3])
    assert bool(after["w/fc1.weight"][2].any())


def test_pruning_can_be_switched_off() -> None:
    method = _bound(fedsparse(prune=False))
    server = method.init(KEY)
    server["v"][:6] += 10.0
    new = method.server_update(server, [_reply(method, server, torch.ones(12, dtype=torch.bool))], KEY)
    assert bool(new["alive"].all())
    assert bool(new["w/fc1.weight"][0].any())
    assert method.standing(new).tolist() == [False] * 6 + [True] * 6  # but predictions go without them
    assert method.metrics(new)["alive_groups"] == 6


def test_a_layer_that_would_die_keeps_its_strongest_group_and_warns() -> None:
    method = _bound()
    server = method.init(KEY)
    server["v"] += torch.arange(12.0).flip(0) + 5.0
    with pytest.warns(RuntimeWarning, match="'fc1'"):
        new = method.server_update(server, [_reply(method, server, torch.ones(12, dtype=torch.bool))], KEY)
    assert int(new["alive"].sum()) == 1
    strongest = int(method.margins({**server, "v": new["v"]})["margin"].argmax())
    assert bool(new["alive"][strongest])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        net = method.global_model(new)
        again = method.server_update(new, [_reply(method, new, torch.ones(1, dtype=torch.bool))], KEY)
    assert net.get_parameter("fc1.weight").shape == (1, 64)
    assert int(again["alive"].sum()) == 1


def test_inputs_are_not_changed() -> None:
    method = _bound()
    server = method.init(KEY)
    server["alive"] = torch.arange(12) > 2
    before = {name: leaf.clone() for name, leaf in server.items()}
    received = method.broadcast(server, ONE, KEY)
    kept = {name: leaf.clone() for name, leaf in received.items()}
    update = method.client_update(received, {}, data.digits(clients=10).client(1), ONE, KEY)
    message = {name: leaf.clone() for name, leaf in update.message.items()}
    method.server_update(server, [Reply(ONE, update.message, received)], KEY)
    method.global_model(server)
    assert all(torch.equal(server[name], leaf) for name, leaf in before.items())
    assert all(torch.equal(received[name], leaf) for name, leaf in kept.items())
    assert all(torch.equal(update.message[name], leaf) for name, leaf in message.items())


# --- client ----------------------------------------------------------------------------------------------------------


def test_what_a_client_ends_with_is_what_the_server_can_rebuild() -> None:
    method = _bound(fedsparse(lambda0=5e-3, solver=Solver(lr=0.1, local_epochs=2, batch_size=8)))
    server = method.init(KEY)
    received = method.broadcast(server, ONE, KEY)
    update = method.client_update(received, {}, data.digits(clients=10).client(1), ONE, KEY)
    opened = update.message["#gates"]
    assert 0 < int(opened.sum()) < 12
    assert update.metrics["open_gates"] == int(opened.sum())
    assert update.fitted is not None
    fitted = read_state(update.fitted)
    for name, piece in method.groups.pieces.items():
        delta = piece.put(update.message[name], opened)
        whole = (received[name].view(delta.shape) + delta) * opened.view(-1, *(1,) * (delta.dim() - 1))
        assert torch.allclose(fitted[name], whole, atol=1e-6)


def test_the_same_key_gives_the_same_turn_and_dead_gates_stay_closed() -> None:
    method = _bound()
    server = method.init(KEY)
    server["alive"] = torch.arange(12) % 3 > 0
    received = method.broadcast(server, ONE, KEY)
    turns = [method.client_update(received, {}, data.digits(clients=10).client(1), ONE, KEY) for _ in range(2)]
    first = {name: leaf.clone() for name, leaf in turns[0].message.items()}
    assert all(torch.equal(turns[1].message[name], leaf) for name, leaf in first.items())
    assert len(turns[1].message["#gates"]) == 8
    assert turns[1].fitted is not None
    assert not bool(read_state(turns[1].fitted)["fc1.weight"][~server["alive"]].any())


def test_l0_counts_weights_or_groups() -> None:
    by_weight = GatePosterior.at(
        _bound(fedsparse(xi=0.0, lambda0=1e-3)), subtree("w", _bound().init(KEY)), torch.zeros(12), KEY
    )
    by_group = GatePosterior.at(
        _bound(fedsparse(xi=0.0, lambda0=1e-3, l0_count="groups")),
        subtree("w", _bound().init(KEY)),
        torch.zeros(12),
        KEY,
    )
    assert torch.allclose(by_weight.price, torch.tensor(1e-3 * 64))
    assert torch.allclose(by_group.price, torch.tensor(1e-3))


def test_extreme_margins_stay_finite() -> None:
    posterior = GatePosterior.at(_bound(), subtree("w", _bound().init(KEY)), torch.linspace(-5, 5, 12), KEY)
    assert bool(posterior.price.isfinite().all())
    assert float(posterior.price.abs().max()) <= 1e-4 * 13.9 + 1.3e-5 * 64
    assert bool(posterior.v.isfinite().all())


# --- models, figures, whole runs -------------------------------------------------------------------------------------


def test_the_global_model_is_physically_smaller_and_equal() -> None:
    task = Task(lambda: resnet20_gn((3, 16, 16), 10), initialize=initialize)
    method = _bound(fedsparse(), task)
    server = method.init(KEY)
    server["v"] += 10.0 * (torch.rand(method.groups.count, generator=KEY.torch()) < 0.5)
    net = method.global_model(server)
    masked = task.fresh().eval()
    masked.load_state_dict(method.groups.masked(subtree("w", server), method.standing(server)), strict=False)
    x = torch.randn(2, 3, 16, 16, generator=KEY.torch())
    with torch.no_grad():
        assert torch.allclose(net(x), masked(x), atol=1e-5)
    assert num_parameters(net) < 0.5 * num_parameters(masked)
    figures = method.metrics(server)
    assert 0.4 < figures["removed"] < 0.6
    assert 0.0 < figures["closed/layer3.2.conv2"] < 1.0
    assert figures["alive_groups"] == int(method.standing(server).sum())


@pytest.mark.parametrize("setting", [{}, {"structured": False}, {"gate_output": True}, {"server": None}])
def test_it_learns_digits_with_its_defaults(setting: dict[str, object]) -> None:
    simulation = _simulation(fedsparse(**setting), rounds=12)  # type: ignore[arg-type]
    *_, last = simulation
    assert not last["rejected"]
    assert last["global_accuracy"] > 0.8
    assert isinstance(inside(simulation.method), SpikeSlab)
    assert 0 <= simulation.method.metrics(simulation.state.server)["removed"] < 1


@pytest.mark.parametrize(
    ("up", "down"), [("eden:bits=4", "float32"), ("eden:bits=1", "float16"), ("qsgd:levels=4", "eden:bits=6")]
)
def test_codecs_work_on_what_survives(up: str, down: str) -> None:
    federation = data.digits(clients=10)
    method = fedsparse(lambda0=1e-4)
    run = fit(data=federation, method=method, up=up, down=down, rounds=12, cohort=4, workers=0, eval_every=12)
    last = run.history[-1]
    assert not last["rejected"]
    assert last["global_accuracy"] > 0.7
    assert last["bytes_up"] < 4 * 4 * 4810 * 4 / 32 + 4 * 200
    assert run.model.get_parameter("fc1.weight").shape[0] < 64


def test_margins_keep_every_theta_when_weights_are_rounded() -> None:
    """Thresholds travel as ‖w‖ − τ, so that a codec that moves norms does not move gates."""
    method = _bound()
    server = method.init(KEY)
    codec, shared = codecs.parse("eden:bits=4"), Shared(KEY)
    tree = method.broadcast(server, ONE, KEY)
    blob, _ = codec.encode({name: leaf for name, leaf in tree.items() if name != "#margins"}, shared, {})
    spec = {name: leaf for name, leaf in method.broadcast_spec(ONE, KEY).items() if name != "#margins"}
    rounded = codec.decode(blob, spec, shared)
    start = method._unpacked(rounded)
    assert not torch.allclose(method.groups.norms(start), method.groups.norms(subtree("w", server)), atol=1e-3)
    pi = GatePosterior.at(method, start, tree["#margins"], KEY).probabilities(start)
    assert torch.allclose(pi, torch.tensor(0.99), atol=1e-5)


def test_workers_make_no_difference() -> None:
    method = fedsparse(lambda0=1e-3, solver=SHORT)
    states = []
    for workers in (0, 2):
        simulation = _simulation(method, rounds=3, workers=workers)
        list(simulation)
        states.append(simulation.state.server)
    assert all(torch.equal(states[0][name], leaf) for name, leaf in states[1].items())


def test_presets_and_lambda0() -> None:
    """Presets are what was calibrated on LeNet5-FS, and follow the size of a model's largest groups."""
    task = Task(lambda: lenet5_fs((3, 32, 32), 10))
    found = [_bound(fedsparse(sparsity=s), task).penalty for s in ("low", "mid", "high")]
    assert found == pytest.approx([2.85e-7, 5e-7, 1.5e-6], rel=2e-3)
    assert _bound(fedsparse()).penalty == pytest.approx(5e-7 * 1600 / 64, rel=2e-3)
    assert _bound(fedsparse(l0_count="groups")).penalty == pytest.approx(5e-7 * 1600, rel=2e-3)
    assert _bound(fedsparse(sparsity="low", lambda0=1e-3)).penalty == 1e-3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lambda0": -1e-6}, "lambda0"),
        ({"lambda0": math.nan}, "lambda0"),
        ({"xi": -1.0}, "xi"),
        ({"lambda_": -1.0}, "lambda_"),
        ({"temperature": 0.0}, "temperature"),
        ({"epsilon": 1.0}, "epsilon"),
        ({"l0_count": "filters"}, "l0_count"),
        ({"gates": "shut"}, "gates"),
        ({"sparsity": "medium"}, "sparsity"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fedsparse(**settings)  # type: ignore[arg-type]


def test_models_without_gates_are_refused_when_the_run_is_set_up() -> None:
    with pytest.raises(ConfigError, match=r"^this model has no gateable layer"):
        fedsparse().bind(Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))))
    with pytest.raises(ConfigError, match="Sigmoid"):
        fedsparse().bind(Task(lambda: nn.Sequential(nn.Linear(64, 8), nn.Sigmoid(), nn.Linear(8, 10))))


def test_slopes_of_the_relaxation() -> None:
    concrete = torch.linspace(0.01, 0.99, 50, dtype=torch.float64).requires_grad_()
    gates = (concrete * 1.2 - 0.1).clamp(0, 1)
    by_concrete = torch.autograd.grad(gates.sum(), concrete)[0]
    expected = by_concrete * concrete * (1 - concrete) / (2 / 3)
    assert torch.allclose(hard_slope(concrete.detach()), expected.detach())
    y = torch.tensor([1e-6, 0.1, 3.0, 50.0], dtype=torch.float64)
    assert torch.allclose(F.softplus(inverse_softplus(y)), y)
