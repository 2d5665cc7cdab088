from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.methods.conftest import definition, inside
from torch import nn

from laconic.codecs import float32
from laconic.core import (
    ALONE,
    ClientInfo,
    ConfigError,
    Key,
    Population,
    Reply,
    Task,
    Tree,
    prefixed,
    read_state,
    subtree,
    tree_sha256,
)
from laconic.engine import Link, Schedule, Simulation
from laconic.evaluations import EVALUATIONS
from laconic.methods import (
    EM,
    Gaussian,
    ServerOptimizer,
    Solver,
    Vote,
    fedavg,
    fedensemble,
    fedmedian,
    fedopt,
    weighted_mean,
)
from laconic.testing import small_federation, small_task

KEY = Key.from_seed(0)
FEDERATION = small_federation()


def random_tree(task: Task, seed: int) -> Tree:
    rng = KEY.fold_in("tree", seed).torch()
    return {name: torch.randn(leaf.shape, generator=rng) for name, leaf in task.spec.items()}


def replies(task: Task, examples: list[int]) -> list[Reply]:
    return [Reply(ClientInfo(i, 1, n), random_tree(task, i), {}) for i, n in enumerate(examples)]


# --- weighting -------------------------------------------------------------------------------------------------------


def test_uniform_weighting_counts_every_client_once() -> None:
    task = small_task()
    method = fedavg(weighting="uniform").bind(task)
    server = method.init(KEY)
    many, few = (method.server_update(server, replies(task, sizes), KEY) for sizes in ([1, 2, 600], [5, 5, 5]))
    assert tree_sha256(many) == tree_sha256(few)
    for name in task.spec:
        mean = sum((r.message[name] for r in replies(task, [1, 1, 1])), torch.zeros(())) / 3
        torch.testing.assert_close(many[f"w/{name}"], server[f"w/{name}"] + mean, rtol=1e-6, atol=1e-6)


def test_weighting_by_examples_is_replicating_clients() -> None:
    task = small_task()
    weighted, uniform = fedavg(weighting="examples").bind(task), fedavg().bind(task)
    server = weighted.init(KEY)
    one = weighted.server_update(server, replies(task, [1, 2, 5]), KEY)
    copied = [reply for reply in replies(task, [1, 2, 5]) for _ in range(reply.client.examples)]
    other = uniform.server_update(server, copied, KEY)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-6)
    assert tree_sha256(one) != tree_sha256(uniform.server_update(server, replies(task, [1, 2, 5]), KEY))


@pytest.mark.filterwarnings("ignore:fedmedian with weighting")
@pytest.mark.parametrize("make", [fedavg, fedopt, fedmedian, fedensemble])
def test_equal_clients_are_weighted_equally_either_way(make: Any) -> None:
    task = small_task()
    uniform, weighted = make().bind(task), make(weighting="examples").bind(task)
    server = uniform.init(KEY)
    note = {"#member": torch.tensor([0], dtype=torch.uint8)} if make is fedensemble else {}
    sent = [Reply(r.client, {**r.message, **note}, {}) for r in replies(task, [4, 4, 4, 4])]
    one, other = (method.server_update(server, sent, KEY) for method in (uniform, weighted))
    assert tree_sha256(one) == tree_sha256(other)  # 4 is a power of two: nothing is rounded on its account


def test_weighted_mean() -> None:
    votes = [Vote(1.0, {"a": torch.tensor([2.0])}), Vote(3.0, {"a": torch.tensor([6.0])})]
    assert weighted_mean(iter(votes))["a"].tolist() == [5.0]
    assert votes[0].message["a"].tolist() == [2.0]


def test_the_mean_is_folded_in_the_order_given() -> None:
    # (1e8 + 1) − 1e8 = 0 in float32, but (1e8 − 1e8) + 1 = 1.
    values = {x: Vote(1.0, {"a": torch.tensor([x])}) for x in (1e8, 1.0, -1e8)}
    assert weighted_mean([values[1e8], values[1.0], values[-1e8]])["a"].tolist() == [0.0]
    assert weighted_mean([values[1e8], values[-1e8], values[1.0]])["a"].tolist() == [torch.tensor(1.0).div(3.0).item()]


def test_an_unknown_weighting_is_refused_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"^unknown weighting 'example'; did you mean 'examples'\?$"):
        fedavg(weighting="example")


# --- the round trip --------------------------------------------------------------------------------------------------


def test_the_message_is_the_difference_from_what_was_received() -> None:
    task = small_task(batch_norm=True)
    method = fedavg(solver=Solver(lr=0.1, local_epochs=1, batch_size=5)).bind(task)
    received = method.broadcast(method.init(KEY), ClientInfo(3, 1, 0), KEY)
    update = method.client_update(received, {}, FEDERATION.client(3), ClientInfo(3, 1, 0), KEY)
    assert update.fitted is task.module
    assert update.personal == {}
    for name, leaf in read_state(task.module).items():
        assert torch.equal(leaf - received[name], update.message[name])
    assert list(update.message) == list(task.spec)


def test_one_client_and_one_round_of_fedavg_is_local_training() -> None:
    task = small_task()
    method = fedavg(solver=Solver(lr=0.1, local_epochs=2, batch_size=5)).bind(task)
    server = method.init(KEY)
    received = method.broadcast(server, ClientInfo(5, 1, 0), KEY)
    update = method.client_update(received, {}, FEDERATION.client(5), ClientInfo(5, 1, 0), KEY)
    own = {name: leaf.clone() for name, leaf in read_state(task.module).items()}
    new = method.server_update(server, [Reply(ClientInfo(5, 1, 17), update.message, received)], KEY)
    for name, leaf in own.items():
        torch.testing.assert_close(new[f"w/{name}"], leaf, rtol=1e-6, atol=1e-7)  # w + (φ − w) is φ up to a rounding


def test_the_server_predicts_with_its_weights() -> None:
    task = small_task(batch_norm=True)
    method = fedavg().bind(task)
    server = prefixed("w", {**random_tree(task, 0), "1.running_var": torch.rand(6) + 1})
    assert method.local_model is not None
    for model in (method.global_model(server), method.local_model(subtree("w", server), {})):
        assert not model.training
        assert model is not task.module
        assert tree_sha256(read_state(model)) == tree_sha256(subtree("w", server))


class Slashed(nn.Module):
    """Leaves whose names hold a slash, which is ours for prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a/b": nn.Linear(4, 3), "0/1": nn.BatchNorm1d(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.parts["0/1"](self.parts["a/b"](x))
        return out


@pytest.mark.parametrize("make", [fedopt, fedensemble])
def test_slashes_in_names_do_not_hide_parameters_from_the_optimizer(make: Any) -> None:
    server = ServerOptimizer("adam", lr=0.1)
    method = make(server=server, solver=Solver(lr=0.1, local_epochs=1, batch_size=5))
    simulation = Simulation(
        method,
        Task(Slashed),
        FEDERATION,
        Link(float32(), float32()),
        Schedule(rounds=2, cohort=4),
        seed=0,
        workers=0,
        evaluations=EVALUATIONS,
    )
    assert not any(record["rejected"] for record in simulation)
    state = simulation.state.server
    moments = {name for name in state if name.endswith("/exp_avg")}
    prefixes = [""] if make is fedopt else ["0/", "1/", "2/"]
    assert moments == {f"optimizer/{p}{name}/exp_avg" for p in prefixes for name in simulation.method.task.trainable}
    assert len(simulation.method.task.trainable) == 4


def test_paper_bytes_are_four_per_parameter_both_ways() -> None:
    task = small_task()
    count = sum(leaf.size for leaf in task.spec.values())
    for method, models in ((fedavg(), 1), (fedensemble(members=3), 3)):
        bound, client = method.bind(task), ClientInfo(3, 1, 0)
        received = bound.broadcast(bound.init(KEY), client, KEY)
        message = bound.client_update(received, {}, FEDERATION.client(3), client, KEY).message
        assert bound.paper_bytes(received, message) == 4 * (models + 1) * count


# --- what it is ------------------------------------------------------------------------------------------------------


def test_a_method_can_be_bound_to_any_number_of_tasks() -> None:
    method, one, other = fedavg(), small_task(), small_task()
    bound = method.bind(one)
    assert bound.task is one
    assert method.bind(other).task is other
    assert bound.task is one
    with pytest.raises(RuntimeError, match=r"this method has no task yet: bind\(task, population\) gives it one"):
        EM(Gaussian(), Solver()).init(KEY)


def test_a_method_is_bound_to_one_client_unless_somebody_says() -> None:
    method = fedavg()
    assert inside(method.bind(small_task())).population == ALONE == Population(1, 1)
    assert inside(method.bind(small_task(), Population(6, 4))).population == Population(6, 4)


def test_a_method_is_a_value() -> None:
    task = small_task()
    made = fedavg(solver=Solver(lr=0.1))
    assert inside(made.bind(task)) == inside(EM(Gaussian(), Solver(lr=0.1)).bind(task))
    assert inside(made.bind(task)) != inside(fedavg().bind(task))
    assert definition(made) == definition(fedavg(lr=0.1)) != definition(fedavg())
    with pytest.raises(AttributeError):
        made.name = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        made.bind(task).personal = True  # type: ignore[misc]
