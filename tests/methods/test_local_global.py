from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.methods.conftest import inside
from torch import nn

from laconic.codecs import parse
from laconic.core import (
    Bound,
    ClientInfo,
    ConfigError,
    Goal,
    Key,
    Method,
    Task,
    Tree,
    Update,
    isolated,
    num_values,
    read_state,
    tree_sha256,
)
from laconic.data import digits, with_validation
from laconic.engine import Link, Schedule, Simulation, unpack
from laconic.evaluations import EVALUATIONS
from laconic.experiment import fit
from laconic.methods import (
    Depth,
    Jigsaw,
    KeepLocal,
    ServerOptimizer,
    Solver,
    fedavg,
    feddrop,
    fedensemble,
    fedmedian,
    fedopt,
    fedprox,
    fedsparse,
    lg_fedavg,
    lg_fedsparse,
    local_only,
)
from laconic.methods.local_global import paper_parameters, paper_parameters_mtl
from laconic.model_file import read_model
from laconic.models import mlp, models
from laconic.testing import check_method, small_federation, small_task

SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)
FEDERATION = small_federation()
KEY = Key.from_seed(0)
INNER: dict[str, Method] = {
    "fedavg": fedavg(solver=SOLVER),
    "fedprox": fedprox(mu=0.3, solver=SOLVER),
    "fedopt": fedopt(server=ServerOptimizer("adam", lr=0.01), solver=SOLVER),
    "fedmedian": fedmedian(solver=SOLVER),
    "fedensemble": fedensemble(members=2, solver=SOLVER),
    "fedsparse": fedsparse(solver=SOLVER),
}


def simulation(
    method: Method, *, rounds: int = 3, cohort: int = 4, up: str = "float32", task: Task | None = None
) -> Simulation:
    link = Link(parse(up), parse("float32"))
    schedule = Schedule(rounds=rounds, cohort=cohort, eval_every=1)
    task = task or small_task()
    return Simulation(method, task, FEDERATION, link, schedule, seed=0, workers=0, evaluations=EVALUATIONS)


def done(run: Simulation) -> Simulation:
    for record in run:
        assert "rejections" not in record, record
    return run


def figures(run: Simulation) -> Iterator[dict[str, Any]]:
    for record in run:
        yield {name: value for name, value in record.items() if name != "seconds"}


def own(run: Simulation, client: int) -> Tree:
    """A device's private leaves."""
    return {
        name.removeprefix("local/"): leaf
        for name, leaf in unpack(run.state.personal[client]).items()
        if name.startswith("local/")
    }


# --- §9.5 (a): what is private and what is shared --------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [("0.*",), ("*.bias",), Depth("last", global_layers=1), Depth(fraction=0.7)])
def test_private_and_shared_leaves_are_all_leaves(leaves: Any) -> None:
    task = small_task(batch_norm=True)
    method = inside(KeepLocal(fedavg(), leaves).bind(task))
    shared = set(method.message_spec({}))
    assert shared.isdisjoint(method.private)
    assert shared | set(method.private) == set(task.spec)
    assert shared
    assert method.private


def test_the_papers_counts_of_global_parameters() -> None:
    mlp = Task(lambda: models.build("lg_mlp", {}, given=((1, 28, 28), 10)))
    for layers, count in ((2, 34_186), (3, 99_978)):
        bound = lg_fedavg(global_layers=layers).bind(mlp)
        assert num_values(bound.message_spec({})) == count
    cnn = Task(lambda: models.build("lg_cnn", {}, given=((3, 32, 32), 10)))
    bound = lg_fedavg(global_layers=2, global_part="first").bind(cnn)
    assert num_values(bound.message_spec({})) == 2_872
    assert set(inside(bound).private) == {f"fc{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")}


def test_a_fraction_takes_whole_layers_and_never_more() -> None:
    spec = small_task().spec  # 30 and 21 parameters
    assert Depth(fraction=0.58).chosen(spec) == []
    assert Depth(fraction=0.59).chosen(spec) == ["0.weight", "0.bias"]
    assert Depth("last", fraction=0.42).chosen(spec) == ["3.weight", "3.bias"]
    assert Depth(fraction=1.0).chosen(spec) == list(spec)


# --- §9.5 (b): the two ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(INNER))
@pytest.mark.parametrize("nothing", [(), Depth(global_layers=2), Depth(fraction=0.0)])
def test_with_nothing_private_it_is_the_wrapped_method(name: str, nothing: Any) -> None:
    plain, wrapped = simulation(INNER[name]), simulation(KeepLocal(INNER[name], nothing))
    assert list(figures(plain)) == list(figures(wrapped))
    assert tree_sha256(plain.state.server) == tree_sha256(wrapped.state.server)
    assert plain.state.ledger == wrapped.state.ledger


def test_with_everything_private_devices_are_alone() -> None:
    run = done(simulation(local_only(solver=SOLVER), cohort=6))
    assert run.state.ledger.bytes_up == 3 * 6 * 40  # empty messages: their headers
    assert run.state.ledger.bytes_down == 3 * 6 * 40
    # The same as fitting each device's weights with nobody else about.
    method = fedavg(solver=SOLVER).bind(small_task())
    for client in range(6):
        weights = small_task().init(KEY.fold_in("init_client", client))
        for number in (1, 2, 3):
            key = KEY.fold_in("round", number).fold_in("client", client)
            with_key = ClientInfo(client, number, 0)
            with isolated(key.fold_in("torch")):
                update = method.client_update(weights, {}, FEDERATION.client(client), with_key, key)
            assert update.fitted is not None
            weights = {name: leaf.clone() for name, leaf in read_state(update.fitted).items()}
        assert tree_sha256(own(run, client)) == tree_sha256(weights)


# --- §9.5 (c): who changes when --------------------------------------------------------------------------------------


def test_devices_that_sit_out_keep_their_private_leaves() -> None:
    run = simulation(KeepLocal(fedavg(solver=SOLVER), ("0.*",)), rounds=6, cohort=2)
    before: dict[int, bytes] = {}
    changed = 0
    for _ in run:
        now = dict(run.state.personal)
        moved = {c for c in now if now[c] != before.get(c)}
        assert len(moved) == 2
        changed += len(moved & before.keys())
        before = now
    assert changed
    assert len({run.state.personal[c] for c in before}) == len(before)


def test_all_devices_predict_with_the_same_shared_leaves() -> None:
    run = done(simulation(KeepLocal(fedavg(solver=SOLVER), ("0.*",)), rounds=4))
    method = run.method
    assert method.local_model is not None
    shared = {n.removeprefix("part/w/"): leaf for n, leaf in run.state.server.items() if n.startswith("part/w/")}
    for client in run.state.personal:
        received = method.broadcast(run.state.server, ClientInfo(client, 4, 0), KEY)
        state = dict(method.local_model(received, unpack(run.state.personal[client])).state_dict())
        for name, leaf in shared.items():
            assert torch.equal(state[name], leaf)
        for name, leaf in own(run, client).items():
            assert torch.equal(state[name], leaf)


def test_the_first_turn_brings_the_private_leaves_down_once() -> None:
    method = KeepLocal(fedavg(solver=SOLVER), ("0.*",))
    run = simulation(method, cohort=6)
    costs = [(record["bytes_down"], record["bytes_up"]) for record in run]
    header, bit, shared, private = 40, 1, 4 * 21, 4 * 30
    assert costs[0] == (6 * (header + bit + private + shared), 6 * (header + shared))
    assert costs[1] == costs[2] == (6 * (header + bit + shared), 6 * (header + shared))


def test_drawing_their_own_costs_devices_nothing() -> None:
    run = done(simulation(KeepLocal(fedavg(solver=SOLVER), ("0.*",), start="own"), cohort=6, rounds=1))
    assert run.state.ledger.bytes_down == 6 * (40 + 4 * 21)
    assert len({tree_sha256(own(run, client)) for client in range(6)}) == 6


# --- phases ----------------------------------------------------------------------------------------------------------


def test_phase_b_begins_where_phase_a_ended() -> None:
    method = lg_fedavg(fedavg_rounds=2, weighting="uniform", solver=SOLVER)
    plain = done(simulation(fedavg(solver=SOLVER), rounds=2))
    run = simulation(method, rounds=3)
    stream = iter(run)
    next(stream)
    next(stream)
    whole = {n.removeprefix("whole/"): leaf for n, leaf in run.state.server.items()}
    assert tree_sha256(whole) == tree_sha256(plain.state.server)
    assert run.state.ledger.bytes_up == plain.state.ledger.bytes_up
    assert not dict(run.state.personal)
    next(stream)
    start = {n.removeprefix("local/"): leaf for n, leaf in run.state.server.items() if n.startswith("local/")}
    assert set(start) == {"0.weight", "0.bias"}
    for name, leaf in start.items():
        assert torch.equal(leaf, plain.state.server[f"w/{name}"])
    assert len(run.state.personal) == 4


def test_before_phase_b_a_devices_model_is_the_global_one() -> None:
    records = list(simulation(lg_fedavg(fedavg_rounds=2, solver=SOLVER), rounds=2))
    assert [record["local_clients"] for record in records] == [6, 6]


def test_another_learning_rate_in_phase_b() -> None:
    slow = lg_fedavg(fedavg_rounds=1, lg_lr=1e-9, solver=SOLVER)
    bound = inside(slow.bind(small_task()))
    assert (bound.solver.lr, inside(bound.part).solver.lr, inside(bound.whole).solver.lr) == (1e-9, 1e-9, 0.1)
    run = done(simulation(slow, rounds=2))
    for client in run.state.personal:
        for name, leaf in own(run, client).items():
            torch.testing.assert_close(leaf, run.state.server[f"local/{name}"], atol=1e-6, rtol=0)


def test_a_warm_up_trains_private_leaves_alone() -> None:
    solver = replace(SOLVER, lr=0.05)

    def warming(*, epochs: int = 3, after: int = 1) -> Method:
        method = fedavg(solver=solver)
        return KeepLocal(method, ("0.*",), warmup_epochs=epochs, warmup_after=after, solver=solver)

    method = warming()
    late, early = done(simulation(method, rounds=3)), done(simulation(warming(after=3), rounds=3))
    known = set(done(simulation(method, rounds=1)).state.personal)
    newcomers = set(late.state.personal) - known
    assert newcomers
    assert all(late.state.personal[c] != early.state.personal[c] for c in newcomers)
    # It happens at the first turn only, and what is shared starts from what was received.
    warm, cold = method.bind(small_task()), warming(epochs=0).bind(small_task())
    client, data = ClientInfo(0, 2, 0), FEDERATION.client(3)
    received = warm.broadcast(warm.init(KEY), client, KEY)

    def sent(bound: Bound, personal: Tree) -> Update:
        with isolated(KEY):
            return bound.client_update(received, personal, data, client, KEY)

    first = sent(warm, {})
    assert tree_sha256(first.message) != tree_sha256(sent(cold, {}).message)
    assert tree_sha256(sent(warm, first.personal).message) == tree_sha256(sent(cold, first.personal).message)


# --- together with other methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(INNER))
def test_any_method_keeps_the_laws_with_private_leaves(name: str) -> None:
    task = small_task(batch_norm=True)
    check_method(KeepLocal(INNER[name], ("4.*",)), task=task, workers=0)


def test_a_prior_knows_nothing_of_private_leaves() -> None:
    """An overwhelming prior holds the shared leaves where they were, and only those."""
    method = KeepLocal(fedprox(mu=9.0, solver=SOLVER), ("0.*",)).bind(small_task())
    client, data = ClientInfo(0, 1, 0), FEDERATION.client(3)
    received = method.broadcast(method.init(KEY), client, KEY)
    free = KeepLocal(fedavg(solver=SOLVER), ("0.*",)).bind(small_task())
    with isolated(KEY):
        held = method.client_update(received, {}, data, client, KEY)
    with isolated(KEY):
        loose = free.client_update(received, {}, data, client, KEY)
    norm = {
        name: sum(float(leaf.abs().sum()) for leaf in update.message.values())
        for name, update in (("held", held), ("loose", loose))
    }
    assert norm["held"] < norm["loose"]
    moved = [held.personal[f"local/{n}"].flatten() - received[f"local/{n}"] for n in ("0.weight", "0.bias")]
    assert all(float(leaf.abs().max()) > 1e-3 for leaf in moved)


def test_gates_close_units_of_the_shared_part_only() -> None:
    method = inside(lg_fedsparse(sparsity="high", solver=SOLVER).bind(small_task()))
    assert inside(method.part).groups.count == 6
    with pytest.warns(RuntimeWarning, match="the strongest one is kept"):
        run = done(simulation(lg_fedsparse(lambda0=5.0, threshold_lr=0.2, solver=SOLVER), rounds=4))
    assert run.state.ledger.bytes_up < 4 * 4 * (40 + 1 + 4 * 30)


CLOSING = {"lambda0": 1e-3, "threshold_lr": 0.1, "lr": 0.1, "local_epochs": 1, "batch_size": 20}


@pytest.mark.filterwarnings("ignore:fedsparse")
@pytest.mark.parametrize(
    ("method", "closed"),
    [
        (KeepLocal(fedsparse(**CLOSING), ("fc3.*",)), {"fc1", "fc2"}),
        (KeepLocal(fedsparse(**CLOSING), ("fc1.*",)), {"fc2"}),
        (KeepLocal(fedsparse(**CLOSING), ("fc3.*",), first_rounds=10), {"fc1", "fc2"}),
        (lg_fedsparse(global_layers=2, **CLOSING), {"fc1", "fc2"}),
        (lg_fedsparse(global_layers=2, fedavg_rounds=2, **CLOSING), {"fc1", "fc2"}),
    ],
    ids=["last layer", "first layer", "in phase A", "lg_fedsparse", "lg_fedsparse after phase A"],
)
def test_a_model_with_closed_units_has_a_file(method: Method, closed: set[str], tmp_path: Path) -> None:
    images, net = digits(clients=4), partial(mlp, (1, 8, 8), 10, hidden=[24, 16])
    run = fit(method=method, data=images, model=net, rounds=10, cohort=4, workers=0, eval_every=10, out=tmp_path)
    assert run.directory is not None
    found = read_model((run.directory / "model.lac").read_bytes(), net)
    whole, left = net().state_dict(), run.model.state_dict()
    smaller = {name for name, leaf in whole.items() if left[name].shape != leaf.shape}
    assert {name for name in smaller if name.endswith("bias")} == {f"{layer}.bias" for layer in closed}
    assert found.artifact.kind == "units"
    x = images.test.tensors()[0]
    with torch.no_grad():
        assert torch.equal(found.model()(x), run.model(x))


def test_fedsparse_on_the_shared_part_begins_where_fedavg_ended() -> None:
    whole = done(simulation(fedavg(solver=SOLVER, weighting="examples"), rounds=2)).state.server
    method = lg_fedsparse(fedavg_rounds=2, fedavg_lr=SOLVER.lr, weighting="examples", solver=replace(SOLVER, lr=0.01))
    run = simulation(method, rounds=3)
    states = [run.state.server for _ in run]
    assert all(torch.equal(states[1][f"whole/{name}"], leaf) for name, leaf in whole.items())
    started = {name: leaf for name, leaf in states[2].items() if name.startswith("local/")}
    assert started
    assert all(torch.equal(leaf, whole[name.replace("local/", "w/")]) for name, leaf in started.items())
    begun = inside(run.method).advance(states[1])
    shared = {name: leaf for name, leaf in begun.items() if name.startswith("part/w/")}
    assert len(shared) + len(started) == len(whole)
    assert all(torch.equal(leaf, whole[name.removeprefix("part/")]) for name, leaf in shared.items())


def test_nothing_to_gate_in_the_shared_part() -> None:
    with pytest.raises(ConfigError, match=r"^what is shared of this model has no gateable layer: gates need"):
        KeepLocal(fedsparse(), ("0.*",)).bind(small_task())


@pytest.mark.parametrize("up", ["eden:bits=2", "ef(topk:fraction=0.5 | eden:bits=4)"])
def test_codecs_see_the_shared_part_only(up: str) -> None:
    lg = done(simulation(KeepLocal(fedavg(solver=SOLVER), ("0.*",)), up=up))
    plain = done(simulation(fedavg(solver=SOLVER), up=up))
    assert lg.state.ledger.bytes_up < plain.state.ledger.bytes_up


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KeepLocal(fedavg(), ("0.weigth",)), r"matches '0.weigth'; did you mean '0.weight'\?"),
        (lambda: KeepLocal(fedavg(), ("4.*",)), r"matches '4\.\*'; did you mean '\d\.\*'\?"),
        (lambda: KeepLocal(fedavg(), ("*",)), "every leaf that is trained would be private.*local_only"),
        (lambda: lg_fedavg(global_layers=0), "every leaf that is trained would be private"),
        (lambda: lg_fedavg(global_layers=-1), "global layers must not be negative, got -1"),
        (lambda: KeepLocal(feddrop(), ("0.*",)), "feddrop cuts units through the whole model"),
        (lambda: lg_fedavg(fedavg_rounds=3, start="own"), "start = 'own' goes without rounds on the whole model"),
        (lambda: Depth(), "either global_layers or fraction"),
        (lambda: Depth(fraction=1.5), r"must lie in \[0, 1\], got 1.5"),
        (lambda: KeepLocal(fedavg(), ("0.*",), start="mine"), "unknown start 'mine'"),  # type: ignore[arg-type]
        (lambda: KeepLocal(fedavg(), ("0.*",), warmup_epochs=-1), "warmup_epochs must not be negative, got -1"),
        (lambda: KeepLocal(fedavg(), ("0.*",), warmup_epochs=2), "warmup_epochs and objective need the solver of priv"),
        (lambda: KeepLocal(fedavg(), ("0.*",), private_epochs=2), "^KeepLocal: private_epochs, .* need the solver of"),
        (lambda: KeepLocal(fedavg(), ("0.*",), objective=Jigsaw()), "objective need the solver of private leaves"),
        (lambda: lg_fedsparse(fedavg_lr=0.1), "fedavg_lr is the learning rate of fedavg_rounds"),
        (lambda: lg_fedavg(objective="jigsaw", objective_weight=-1.0), "weight of a local objective"),
        (lambda: lg_fedavg(objective="autoencoder", global_layers=9), "a local objective needs private leaves"),
    ],
)
def test_refusals(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make().bind(small_task())


def test_phase_a_needs_a_single_model() -> None:
    run = simulation(KeepLocal(INNER["fedensemble"], ("0.*",), first_rounds=1), rounds=2)
    with pytest.raises(ConfigError, match="keeps no single model that devices could start from"):
        list(run)


def test_frozen_and_tied_parameters() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        net[0].bias.requires_grad_(False)
        return net

    check_method(KeepLocal(fedavg(solver=SOLVER), ("0.*",)), task=Task(build), workers=0)


# --- §9.5 (d): what the paper would print ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "printed"),
    [
        (paper_parameters(devices=100, fraction=0.1, parameters=633_226, rounds=725), "5.05e+10"),
        (
            paper_parameters(devices=100, fraction=0.1, parameters=633_226, rounds=400, global_=34_186, lg_rounds=50),
            "2.80e+10",
        ),
        (paper_parameters_mtl(devices=100, parameters=633_226, rounds=400), "5.07e+10"),
        (paper_parameters(devices=100, fraction=0.1, parameters=64_102, rounds=1850), "1.304e+10"),
        (
            paper_parameters(devices=100, fraction=0.1, parameters=64_102, rounds=1200, global_=2_872, lg_rounds=60),
            "8.48e+09",
        ),
        (paper_parameters_mtl(devices=100, parameters=64_102, rounds=1400), "1.795e+10"),
        (paper_parameters(devices=50, fraction=0.1, parameters=54_042_572, rounds=47), "1.397e+11"),
        (
            paper_parameters(
                devices=50, fraction=0.1, parameters=54_042_572, rounds=32, global_=5_149_200, lg_rounds=17
            ),
            "9.99e+10",
        ),
    ],
)
def test_costs_as_the_paper_prints_them(cost: int, printed: str) -> None:
    decimals = len(printed.split("e")[0]) - 2
    assert f"{cost:.{decimals}e}" == printed


def test_three_global_layers_do_not_give_the_printed_cost() -> None:
    """The text's 99,978 global parameters are not those of its table."""
    cost = paper_parameters(devices=100, fraction=0.1, parameters=633_226, rounds=400, global_=99_978, lg_rounds=50)
    assert f"{cost:.3e}" == "2.841e+10"


def test_the_cost_column_of_a_run_counts_what_is_shared() -> None:
    run = done(simulation(lg_fedavg(fedavg_rounds=1, solver=SOLVER), rounds=3))
    assert run.state.ledger.paper_bytes == 4 * 4 * 2 * (51 + 21 + 21)


# --- until a goal ----------------------------------------------------------------------------------------------------

HELD = with_validation(FEDERATION, fraction=0.25)
AIMING = lg_fedavg(goal=0.6, solver=SOLVER)


def aiming(method: Any = AIMING, *, rounds: int = 12, workers: int = 0, up: str = "float32") -> Simulation:
    link = Link(parse(up), parse("float32"))
    schedule = Schedule(rounds=rounds, cohort=4, eval_every=2)
    return Simulation(method, small_task(), HELD, link, schedule, seed=0, workers=workers, evaluations=EVALUATIONS)


def test_phase_a_ends_at_the_first_evaluation_that_reaches_the_goal() -> None:
    records = list(aiming())
    judged = [record for record in records if "validation_accuracy" in record]
    (ended,) = [record["round"] for record in records if "goal_round" in record]
    assert 2 < ended < 10, "a goal that is reached neither at once nor at the end"
    for record in judged:
        assert (record["validation_accuracy"] >= 0.6) >= (record["round"] == ended)
        assert record["round"] >= ended or record["validation_accuracy"] < 0.6
        assert ("global_parameters" in record) == (record["round"] > ended)


def test_a_goal_gives_what_the_same_rounds_counted_give() -> None:
    run = done(aiming())
    ended = next(record["round"] for record in aiming() if "goal_round" in record)
    counted = done(aiming(lg_fedavg(fedavg_rounds=ended, solver=SOLVER)))
    assert tree_sha256(run.state.server) == tree_sha256(counted.state.server)
    assert dict(run.state.personal) == dict(counted.state.personal)
    assert run.state.ledger.bytes_up == counted.state.ledger.bytes_up
    assert run.state.ledger.paper_bytes == counted.state.ledger.paper_bytes
    # Every bit takes a byte: two in phase A, where there was none, and one more in phase B.
    assert run.state.ledger.bytes_down == counted.state.ledger.bytes_down + 4 * (2 * ended + (12 - ended))


@pytest.mark.parametrize("up", ["float32", "ef(topk:fraction=0.5 | eden:bits=4)"])
def test_a_goal_does_not_depend_on_workers(up: str) -> None:
    one, two = done(aiming(up=up)), done(aiming(up=up, workers=2))
    assert tree_sha256(one.state.server) == tree_sha256(two.state.server)


def test_rounds_limit_a_phase_that_misses_its_goal() -> None:
    run = done(aiming(lg_fedavg(goal=1.0, fedavg_rounds=3, solver=SOLVER), rounds=5))
    counted = done(aiming(lg_fedavg(fedavg_rounds=3, solver=SOLVER), rounds=5))
    assert tree_sha256(run.state.server) == tree_sha256(counted.state.server)
    never = done(aiming(lg_fedavg(goal=1.0, solver=SOLVER), rounds=3))
    assert not dict(never.state.personal)


def test_a_goal_on_test_data_is_by_name() -> None:
    records = list(aiming(lg_fedavg(goal=0.5, goal_on="test", solver=SOLVER)))
    (ended,) = [record["round"] for record in records if "goal_round" in record]
    assert records[ended - 1]["global_accuracy"] >= 0.5
    with pytest.raises(ConfigError, match="validation data, but none is held out; set run"):
        simulation(AIMING)
    with pytest.raises(ConfigError, match=r"goal must be an accuracy above 0 and at most 1, got 97\.5"):
        lg_fedavg(goal=97.5)
    with pytest.raises(ConfigError, match="goal needs methods that send plain weights"):
        KeepLocal(INNER["fedensemble"], ("0.*",), goal=Goal(0.5)).bind(small_task())
    with pytest.raises(ConfigError, match="start = 'own' goes without rounds on the whole model"):
        lg_fedavg(goal=0.5, start="own")


def test_the_laws_hold_in_both_phases() -> None:
    check_method(lg_fedavg(goal=0.9, goal_on="test", solver=SOLVER), task=small_task(batch_norm=True), workers=0)
