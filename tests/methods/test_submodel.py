"""FedDrop: sub-models that are really smaller, differences that find their way back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.methods.conftest import inside
from torch import Tensor, nn

from laconic import codecs, data
from laconic.core import (
    ClientInfo,
    ConfigError,
    Key,
    Method,
    Reply,
    Task,
    Tree,
    num_values,
    read_state,
    spec_of,
    subtree,
)
from laconic.engine import Link, Schedule, Simulation
from laconic.evaluations import EVALUATIONS
from laconic.experiment import make_task
from laconic.methods import ServerOptimizer, Solver, SubModel, fedavg, feddrop, fedopt
from laconic.models import initialize, lenet5_fs, mlp, num_parameters, resnet18, resnet20_gn
from laconic.models.surgery import CountedGroupNorm, multiply_adds

KEY = Key.from_seed(5)
SHORT = Solver(lr=0.1, local_steps=3, batch_size=8)


def _lenet(**settings: object) -> SubModel:
    task = Task(lambda: lenet5_fs((3, 32, 32), 10), initialize=initialize)
    return inside(feddrop(**settings).bind(task))


def _resnet(**settings: object) -> SubModel:
    task = Task(lambda: resnet20_gn((3, 16, 16), 10), initialize=initialize)
    return inside(feddrop(**settings).bind(task))


def _client(number: int, round: int = 1) -> ClientInfo:
    return ClientInfo(number, round, 10)


def _simulation(method: Method, *, rounds: int, workers: int = 0, model: str = "mlp") -> Simulation:
    federation = data.digits(clients=10)
    link = Link(codecs.parse("float32"), codecs.parse("float32"))
    schedule = Schedule(rounds=rounds, cohort=4, eval_every=rounds)
    settings = {"hidden": [24, 16]} if model == "mlp" else {}
    task = make_task(federation, model, settings)
    return Simulation(method, task, federation, link, schedule, seed=0, workers=workers, evaluations=EVALUATIONS)


def _moved(method: SubModel, server: Tree, received: Tree, by: float) -> Tree:
    return {name: torch.full_like(leaf, by) for name, leaf in received.items() if name != "#seed"}


# --- sub-models ------------------------------------------------------------------------------------------------------


def test_exactly_floor_of_rate_times_units_are_removed() -> None:
    method = _lenet(conv_rate=0.2, fc_rate=0.5, first_rate=0.1)
    for seed in range(5):
        received = method.broadcast(method.init(KEY), _client(seed), KEY)
        assert {name: tuple(leaf.shape) for name, leaf in received.items()} == {
            "#seed": (1,),
            "conv1.weight": (29, 3, 5, 5),
            "conv1.bias": (29,),
            "conv2.weight": (52, 29, 5, 5),
            "conv2.bias": (52,),
            "fc1.weight": (256, 52 * 25),
            "fc1.bias": (256,),
            "fc2.weight": (10, 256),
            "fc2.bias": (10,),
        }
        assert spec_of(received) == method.broadcast_spec(_client(seed), KEY)


def test_sub_models_differ_between_clients_and_rounds_and_come_again() -> None:
    method = _lenet()
    server = method.init(KEY)

    def seed(client: int, key: Key) -> int:
        return int(method.broadcast(server, _client(client), key)["#seed"])

    assert seed(1, KEY) == seed(1, KEY)
    assert len({seed(1, KEY), seed(2, KEY), seed(1, KEY.fold_in("later"))}) == 3
    rows = [method.draw(s).cuts["fc1.weight"].rows for s in (1, 1, 2)]
    assert isinstance(rows[0], Tensor)
    assert torch.equal(rows[0], rows[1])  # type: ignore[arg-type]
    assert not torch.equal(rows[0], rows[2])  # type: ignore[arg-type]


def test_over_many_rounds_everything_is_trained() -> None:
    method = _lenet(conv_rate=0.3, fc_rate=0.5)
    held = {name: torch.zeros(leaf.shape) for name, leaf in method.task.spec.items()}
    for seed in range(60):
        cuts = method.draw(seed).cuts
        for name, leaf in held.items():
            if name in cuts:
                cuts[name].add_to(leaf, torch.ones(cuts[name].shape(tuple(leaf.shape))))
            else:
                leaf += 1
    assert all(bool((leaf > 0).all()) for leaf in held.values())


def test_a_seed_is_the_same_sub_model_everywhere() -> None:
    """Pinned: both ends must cut alike, whatever machine they run on."""
    rows = _lenet().draw(12345).cuts["conv2.bias"].rows
    assert isinstance(rows, Tensor)
    removed = sorted(set(range(64)) - set(rows.tolist()))
    assert removed == [3, 8, 12, 36, 51, 54]


def test_streams_lose_the_same_channels_everywhere() -> None:
    method = _resnet(conv_rate=0.25)
    cuts = method.draw(3).cuts
    writers = [cuts[f"{name}.weight"].rows for name in ("conv1", "layer1.0.conv2", "layer1.2.conv2")]
    readers = [cuts[f"{name}.weight"].columns for name in ("layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1")]
    for index in (*writers, *readers):
        assert index is not None
        assert torch.equal(index, writers[0])  # type: ignore[arg-type]
    assert len(writers[0]) == 12  # type: ignore[arg-type]
    hidden = cuts["layer1.0.conv1.weight"].rows
    assert hidden is not None
    assert len(hidden) == 12
    assert not torch.equal(hidden, writers[0])  # type: ignore[arg-type]


def test_streams_can_be_kept() -> None:
    cuts = _resnet(conv_rate=0.25, streams="kept").draw(3).cuts
    assert cuts["layer1.0.conv1.weight"].rows is not None
    assert cuts["layer1.0.conv1.weight"].columns is None
    assert cuts["layer1.0.conv2.weight"].rows is None
    assert "conv1.weight" not in cuts
    assert "fc.weight" not in cuts


@pytest.mark.parametrize("streams", ["shared", "kept"])
def test_a_residual_sub_model_computes_what_the_masked_model_computes(streams: str) -> None:
    """Zeros in the removed rows and channels, and in the channels that a shortcut would lead past a removed place."""
    method = _resnet(conv_rate=0.3, streams=streams)
    server = method.init(KEY)
    for name in [name for name in server if "norm" in name]:
        server[name] = server[name] + 0.3 * torch.rand(server[name].shape, generator=KEY.torch())
    received = method.broadcast(server, _client(1), KEY)
    chosen = method.draw(int(received["#seed"]))
    net = method.task.fresh().eval()
    weights = subtree("w", server)
    masked = {name: torch.zeros_like(leaf) for name, leaf in weights.items()}
    for name, leaf in weights.items():
        if name in chosen.cuts:
            chosen.cuts[name].add_to(masked[name], chosen.cuts[name].take(leaf))
        else:
            masked[name] = leaf
    net.load_state_dict(masked)
    present = {layer.name: torch.tensor([chosen.present[s] for s in layer.outputs]) for layer in method.anatomy.layers}
    for stage in ("layer2", "layer3"):
        alive = present[f"{stage}.0.conv2"].view(1, -1, 1, 1)
        shortcut = net.get_submodule(f"{stage}.0.shortcut")
        shortcut.register_forward_hook(lambda _, __, output, alive=alive: output * alive)
    x = torch.randn(2, 3, 16, 16, generator=KEY.torch())
    small = method.local_model(received, {})
    with torch.no_grad():
        assert torch.allclose(small(x), net(x), atol=1e-5)
    assert list(read_state(small)) == list(method.task.spec)
    if streams == "shared":
        assert any(isinstance(module, CountedGroupNorm) for module in small.modules())


def test_batch_norm_statistics_are_cut_too() -> None:
    task = Task(lambda: resnet18((3, 32, 32), 10, stem="cifar"), initialize=initialize)
    method = feddrop(conv_rate=0.5, first_rate=0.5).bind(task)
    received = method.broadcast(method.init(KEY), _client(1), KEY)
    assert received["bn1.running_mean"].shape == received["bn1.weight"].shape == (32,)
    assert received["layer2.0.downsample.0.weight"].shape[:2] == (64, 32)


def test_scaling_multiplies_what_kept_units_send_on() -> None:
    task = Task(lambda: mlp((4,), 2, hidden=(6, 4)), initialize=initialize)
    plain, scaled = (feddrop(fc_rate=0.5, first_rate=0.5, scale=scale).bind(task) for scale in (False, True))
    received = plain.broadcast(plain.init(KEY), _client(1), KEY)
    x = torch.randn(5, 4, generator=KEY.torch())
    net, other = plain.local_model(received, {}), scaled.local_model(received, {})
    hidden = torch.relu(net.get_submodule("fc1")(x.flatten(1)))
    deep = torch.relu(net.get_submodule("fc2")(hidden * (6 / 3)))
    expected = net.get_submodule("fc3")(deep * (4 / 2))
    assert torch.allclose(other(x), expected, atol=1e-6)
    assert not torch.allclose(net(x), expected, atol=1e-3)


# --- the server ------------------------------------------------------------------------------------------------------


def test_coordinates_move_by_the_mean_over_their_holders_and_stay_if_there_are_none() -> None:
    method = _lenet(server=None)
    server = method.init(KEY)
    replies, held, total = [], torch.zeros(512, 1600), torch.zeros(512, 1600)
    for client in range(3):
        received = method.broadcast(server, _client(client), KEY)
        message = _moved(method, server, received, by=float(client + 1))
        replies.append(Reply(_client(client), message, received))
        cut = method.draw(int(received["#seed"])).cuts["fc1.weight"]
        cut.add_to(held, torch.ones(cut.shape((512, 1600))))
        cut.add_to(total, message["fc1.weight"])
    new = method.server_update(server, replies, KEY)
    moved = new["w/fc1.weight"] - server["w/fc1.weight"]
    assert bool((held == 0).any())
    assert bool((held == 3).any())
    assert torch.equal(new["w/fc1.weight"][held == 0], server["w/fc1.weight"][held == 0])
    assert torch.allclose(moved, total / held.clamp(min=1), atol=1e-5)


def test_under_adam_what_nobody_held_moves_by_momentum() -> None:
    method = _lenet()
    server = method.init(KEY)
    for turn in range(2):
        received = method.broadcast(server, _client(turn), KEY)
        replies = [Reply(_client(turn), _moved(method, server, received, by=1.0), received)]
        before, server = server, method.server_update(server, replies, KEY)
    rows = method.draw(int(received["#seed"])).cuts["fc1.bias"].rows
    unheld = torch.ones(512, dtype=torch.bool)
    unheld[rows] = False
    assert bool((server["w/fc1.bias"] != before["w/fc1.bias"])[unheld].any())


def test_weights_may_count_examples() -> None:
    method = _lenet(server=None, weighting="examples", fc_rate=0.0, conv_rate=0.0)
    server = method.init(KEY)
    replies = []
    for client, examples in ((0, 10), (1, 30)):
        received = method.broadcast(server, _client(client), KEY)
        message = _moved(method, server, received, by=float(client))
        replies.append(Reply(replace(_client(client), examples=examples), message, received))
    new = method.server_update(server, replies, KEY)
    assert torch.allclose(new["w/fc2.bias"] - server["w/fc2.bias"], torch.tensor(0.75), atol=1e-6)


@pytest.mark.parametrize("model", ["mlp", "resnet20_gn"])
@pytest.mark.parametrize("server", [None, ServerOptimizer("adam", lr=0.01)])
def test_with_rates_of_0_it_is_fedavg_or_fedadam_bit_for_bit(server: ServerOptimizer | None, model: str) -> None:
    parent = fedavg(solver=SHORT) if server is None else fedopt(server=server, solver=SHORT)
    off = feddrop(conv_rate=0.0, fc_rate=0.0, first_rate=0.0, server=server, solver=SHORT)
    ours, theirs = _simulation(off, rounds=3, model=model), _simulation(parent, rounds=3, model=model)
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.clients["train_loss"] == yours.clients["train_loss"]
        expected = subtree("w", theirs.state.server)
        assert all(torch.equal(subtree("w", ours.state.server)[name], leaf) for name, leaf in expected.items())
    assert mine["global_accuracy"] == yours["global_accuracy"]
    assert mine["local_accuracy"] == yours["local_accuracy"]


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "settings", "rounds", "fedavg_gib", "feddrop_gib"),
    [
        (lambda: lenet5_fs((3, 32, 32), 10), {"conv_rate": 0.1, "fc_rate": 0.5}, 1000, 65.46, 34.56),
        (lambda: resnet20_gn((3, 32, 32), 100), {"conv_rate": 0.1}, 6000, 123.19, 112.13),
        (lambda: lenet5_fs((1, 28, 28), 62), {"conv_rate": 0.2, "fc_rate": 0.4}, 6000, 272.11, 174.34),
    ],
)
def test_the_papers_gibibytes(
    net: object, settings: dict[str, float], rounds: int, fedavg_gib: float, feddrop_gib: float
) -> None:
    task = Task(net)  # type: ignore[arg-type]
    average, drop = fedavg().bind(task), feddrop(**settings).bind(task)
    whole = read_state(task.module)
    received = drop.broadcast(drop.init(KEY), _client(0), KEY)
    message = {name: leaf for name, leaf in received.items() if name != "#seed"}
    assert round(average.paper_bytes(whole, whole) * 10 * rounds / 2**30, 2) == fedavg_gib
    assert round(drop.paper_bytes(received, message) * 10 * rounds / 2**30, 2) == feddrop_gib
    # What is really sent is less: the columns of removed units don't travel.
    assert 8 * num_values(spec_of(message)) < drop.paper_bytes(received, message)


def test_frames_are_the_kept_weights_and_a_seed() -> None:
    simulation = _simulation(feddrop(solver=SHORT), rounds=1)
    record = next(iter(simulation))
    kept = 24 * 65 + 8 * 25 + 10 * 9
    assert record["bytes_up"] == 4 * (40 + 4 * kept)
    assert record["bytes_down"] == 4 * (40 + 4 * kept + 8)
    assert not record["rejected"]


def test_a_sub_model_is_less_work() -> None:
    method = _lenet()
    received = method.broadcast(method.init(KEY), _client(0), KEY)
    small, whole = method.local_model(received, {}), method.task.module
    assert multiply_adds(small, (3, 32, 32)) < 0.9 * multiply_adds(whole, (3, 32, 32))
    assert num_parameters(small) < 0.5 * num_parameters(whole)


def test_it_learns_digits_with_its_defaults() -> None:
    simulation = _simulation(feddrop(), rounds=30)
    *_, last = simulation
    assert last["global_accuracy"] > 0.85


def test_workers_make_no_difference() -> None:
    states = []
    for workers in (0, 2):
        simulation = _simulation(feddrop(solver=SHORT), rounds=3, workers=workers)
        list(simulation)
        states.append(simulation.state.server)
    assert all(torch.equal(states[0][name], leaf) for name, leaf in states[1].items())


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv_rate", "fc_rate", "first_rate"])
@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rates_outside_0_and_1_are_refused(name: str, rate: float) -> None:
    with pytest.raises(ConfigError, match=name):
        feddrop(**{name: rate})


def test_models_that_cannot_be_cut_are_refused_when_the_run_is_set_up() -> None:
    with pytest.raises(ConfigError, match="no droppable layer"):
        feddrop().bind(Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))))
    with pytest.raises(ConfigError, match="LSTM"):
        feddrop().bind(Task(lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 2))))
    with pytest.raises(ConfigError, match="streams"):
        feddrop(streams="none")
