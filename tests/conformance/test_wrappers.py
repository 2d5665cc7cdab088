"""Law 8: a wrapper that changes nothing is the method; and what wrappers that do change something keep, over all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as lc
from laconic.codecs import parse
from laconic.core import (
    Bound,
    ClientInfo,
    ConfigError,
    Key,
    Method,
    Population,
    Reply,
    Task,
    Tree,
    bernoulli_names,
    leaf_bytes,
    num_values,
    on_messages,
    subtree,
    tree_sha256,
)
from laconic.engine import Link, Schedule, Silent, Simulation, unpack
from laconic.evaluations import EVALUATIONS, Ensemble
from laconic.methods import KeepLocal, fedavg, fedpm, fedsparse, lg_fedavg, methods, mtl, vardrop
from laconic.model_file import read_model
from laconic.testing import Byzantine, check_method, identity, scaled, small_federation, small_task

SHORT = {"lr": 0.1, "local_epochs": 1, "batch_size": 4}
FEDERATION = small_federation()
CLIENTS = FEDERATION.num_clients
KEY = Key.from_seed(0)
GOAL = {"goal": 0.6, "goal_on": "test"}


def build(name: str, **settings: Any) -> Method:
    return methods.build(name, {**SHORT, **settings})


CATALOGUE: dict[str, Method] = {
    **{name: build(name) for name in methods},
    "vardrop, synchronous": build("vardrop", lr=0.01, local_steps=1),
    "vardrop, averaged": build("vardrop", lr=0.01, local_steps=4),
    "fedpm, kept optimizer": build("fedpm", persist_optimizer=True),
    "lg_fedavg, goal": build("lg_fedavg", **GOAL),
    "lg_fedavg, phases": build("lg_fedavg", fedavg_rounds=1, lg_lr=0.05),
    "lg_fedavg, objective": build("lg_fedavg", objective="autoencoder", start="own"),
}


def three_layers() -> Task:
    """With units that cannot die: where all have, nothing before them is learnt any more."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return Task(build)


def same(message: Tree, client: ClientInfo, key: Key) -> Tree:
    return dict(message)


def in_order(replies: Iterable[Reply], key: Key) -> Iterable[Reply]:
    yield from replies


# --- law 8 -----------------------------------------------------------------------------------------------------------


class Stop(Silent):
    """Interrupts a run, as Ctrl-C does, when it has made so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def advanced(self, record: Any) -> None:
        if record["round"] == self.rounds:
            raise KeyboardInterrupt


def ran(method: Method, out: Path, *, workers: int = 0, **how: Any) -> dict[str, Any]:
    """All that a run leaves behind, but how long it took."""
    everybody = method.bind(small_task()).replica is not None
    run = lc.fit(
        data=FEDERATION,
        method=method,
        rounds=4,
        cohort=CLIENTS if everybody else 4,
        eval_every=1,
        evaluations=(*EVALUATIONS, Ensemble()),
        workers=workers,
        out=out,
        checkpoint_every=1,
        **how,
    )
    assert run.directory is not None
    files = {name: run.directory / name for name in ("model.lac", "model.safetensors")}
    timed = ("seconds", "started", "finished")
    return {
        "history": [{k: v for k, v in record.items() if "seconds" not in k} for record in run.history],
        "summary": {k: v for k, v in run.summary.items() if not any(word in k for word in timed)},
        "files": {name: file.read_bytes() if file.exists() else None for name, file in files.items()},
    }


@pytest.mark.parametrize("case", list(CATALOGUE))
def test_the_identity_is_the_method_in_all_that_a_run_leaves_behind(case: str, tmp_path: Path) -> None:
    method, wrapped = CATALOGUE[case], identity(CATALOGUE[case])
    whole = ran(method, tmp_path / "method")
    assert whole["summary"]["rejected"] == 0
    assert ran(wrapped, tmp_path / "wrapped") == whole
    # What one of them begins, the other can end.
    for begin, end in ((wrapped, wrapped), (method, wrapped), (wrapped, method)):
        out = tmp_path / f"{begin is wrapped} {end is wrapped}"
        with pytest.raises(KeyboardInterrupt):
            ran(begin, out, observer=Stop(2))
        assert ran(end, out, resume=True, workers=2) == whole


def simulation(
    method: Method, *, task: Task | None = None, link: str = "float32", also: tuple[Any, ...] = (), **schedule: Any
) -> Simulation:
    task = task or small_task()
    cohort = CLIENTS if method.bind(task).replica is not None else 4
    settings = Schedule(**{"rounds": 3, "cohort": cohort, "eval_every": 1, **schedule})
    both, measured = Link(parse(link), parse(link)), (*EVALUATIONS, *also)
    return Simulation(method, task, FEDERATION, both, settings, seed=0, workers=0, evaluations=measured)


@pytest.mark.parametrize("case", list(CATALOGUE))
@pytest.mark.parametrize("link", ["float32", "eden:bits=4"])
def test_the_identity_is_the_method_in_every_state(case: str, link: str) -> None:
    one, other = (simulation(method, link=link) for method in (CATALOGUE[case], identity(CATALOGUE[case])))
    assert one.agreement.fingerprint == other.agreement.fingerprint
    for _ in zip(one, other, strict=True):
        assert (tree_sha256(one.state.server), list(one.state.server)) == (
            tree_sha256(other.state.server),
            list(other.state.server),
        )
        assert dict(one.state.personal) == dict(other.state.personal)
        assert dict(one.state.codec) == dict(other.state.codec)
        assert one.state.ledger == other.state.ledger
        assert one.state.ledger.bytes_up > 0 < one.state.ledger.bytes_down
    assert bool(dict(one.state.personal)) == one.method.personal


@pytest.mark.parametrize("case", list(CATALOGUE))
def test_the_identity_says_of_itself_what_the_method_says(case: str) -> None:
    method, wrapped = CATALOGUE[case], identity(CATALOGUE[case])
    assert (wrapped.name, wrapped.settings, wrapped.link) == (method.name, method.settings, method.link)
    task, population = small_task(), Population(CLIENTS, CLIENTS)
    one, other = method.bind(task, population), wrapped.bind(task, population)
    for field in fields(Bound):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        assert (mine is None) == (theirs is None), field.name
        if isinstance(mine, bool):
            assert mine == theirs, field.name
    server = one.init(KEY)
    assert tree_sha256(server) == tree_sha256(other.init(KEY))
    assert tree_sha256(one.init_client(KEY)) == tree_sha256(other.init_client(KEY))
    if one.phases is not None and other.phases is not None:
        assert one.phases.goal(server) == other.phases.goal(server)
        assert one.phases.goal(server) is not None
        assert tree_sha256(one.phases.advance(server)) == tree_sha256(other.phases.advance(server))
    assert (one.phases is not None) == ("goal" in case)


@pytest.mark.parametrize("case", list(CATALOGUE))
def test_a_method_with_both_its_seams_in_use_keeps_the_laws(case: str) -> None:
    check_method(on_messages(CATALOGUE[case], client=same, server=in_order), workers=0)


@pytest.mark.parametrize("case", list(CATALOGUE))
def test_both_seams_see_every_message_in_order(case: str) -> None:
    sent: list[tuple[int, int, str]] = []
    counted: list[tuple[int, int, str]] = []

    def listening(message: Tree, client: ClientInfo, key: Key) -> Tree:
        assert key.digest == run.agreement.client_key(client).digest
        sent.append((client.round, client.id, tree_sha256(message)))
        return message

    def counting(replies: Iterable[Reply], key: Key) -> Iterable[Reply]:
        for reply in replies:
            counted.append((reply.client.round, reply.client.id, tree_sha256(reply.message)))
            yield reply

    run = simulation(on_messages(CATALOGUE[case], client=listening, server=counting))
    for _ in run:
        pass
    assert [which for *which, _ in counted] == [which for *which, _ in sent] == sorted(which for *which, _ in sent)
    assert len(sent) == 3 * run.schedule.cohort
    received = run.agreement.broadcast(run.state.server, ClientInfo(0, 4, 0))
    if run.method.replica is not None or not bernoulli_names(run.method.message_spec(received)):
        assert counted == sent  # else the client's seam sees probabilities, and the server's what was drawn


# --- Byzantine keeps what it does not change -------------------------------------------------------------------------


def test_lies_do_not_cost_a_method_its_goal() -> None:
    method = Byzantine(build("lg_fedavg", **GOAL), clients={1}, transform=scaled(-0.1))
    run = simulation(method, rounds=12)
    assert run.method.phases is not None
    goal = run.method.phases.goal(run.state.server)
    assert goal is not None
    assert (goal.accuracy, goal.metric) == (0.6, "global_accuracy")
    records = list(run)
    (ended,) = [record["round"] for record in records if "goal_round" in record]
    assert 1 < ended < 12
    assert records[ended - 1]["global_accuracy"] >= 0.6
    assert [("global_parameters" in record) for record in records] == [r > ended for r in range(1, 13)]
    assert run.method.phases.goal(run.state.server) is None
    honest = simulation(build("lg_fedavg", **GOAL), rounds=12)
    assert next(iter(honest))["global_loss"] != records[0]["global_loss"]  # there were lies


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (fedsparse(lambda0=3e-3, threshold_lr=0.01, **SHORT), "units"),
        (fedpm(**SHORT), "mask"),
        (vardrop(local_steps=4, lr=0.01), "weights"),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else value,
)
def test_lies_do_not_cost_a_method_its_model_file(method: Method, kind: str, tmp_path: Path) -> None:
    liar = Byzantine(method, clients={1}, transform=scaled(-0.5))
    run = lc.fit(method=liar, data=FEDERATION, rounds=6, cohort=6, workers=0, out=tmp_path)
    assert run.directory is not None
    model = lc.load(run.directory / "model.lac")
    assert read_model((run.directory / "model.lac").read_bytes()).artifact.kind == kind
    x = FEDERATION.test.tensors()[0]
    with torch.no_grad():
        assert torch.equal(model(x), run.model(x))


@pytest.mark.parametrize("case", list(CATALOGUE))
def test_without_liars_byzantine_is_the_method(case: str) -> None:
    runs = [simulation(method) for method in (CATALOGUE[case], Byzantine(CATALOGUE[case], (), scaled(-100)))]
    ends = []
    for run in runs:
        records = [{k: v for k, v in record.items() if k != "seconds"} for record in run]
        ends.append((records, tree_sha256(run.state.server), dict(run.state.personal), run.state.ledger))
    assert ends[0] == ends[1]


# --- KeepLocal over the catalogue ------------------------------------------------------------------------------------

ALREADY = "{name}: some leaves are private already; give all of them to one KeepLocal, by their names."
REPLICAS = (
    "vardrop with local_steps = 1 sends gradients for replicas of one model, so no leaf of it can stay private; "
    "set local_steps to more than 1."
)
NEVER = {
    "feddrop": "feddrop cuts units through the whole model, so no leaf of it can stay private; use another method.",
    "vardrop": REPLICAS,
    "vardrop, synchronous": REPLICAS,
    **{
        case: ALREADY.format(name=method.name)
        for case, method in CATALOGUE.items()
        if method.name in ("lg_fedavg", "lg_fedsparse", "local_only", "fedper", "fedrep", "fedbabu")
    },
}
"""What no leaf of a model can be private with, and why."""
REFUSED = {
    "two layers": {
        **NEVER,
        "fedsparse": "what is shared of this model has no gateable layer: gates need a convolution or linear layer "
        "before the output layer. Share more layers, or gate_output = true to gate what the output layer reads.",
    },
    "three layers": NEVER,
}
TASKS = {"two layers": small_task, "three layers": three_layers}
PRIVATE = ("0.weight", "0.bias")


@pytest.mark.parametrize("layers", list(TASKS))
@pytest.mark.parametrize("case", list(CATALOGUE))
def test_the_first_layer_can_be_private_or_is_refused_in_one_sentence(case: str, layers: str) -> None:
    method = KeepLocal(CATALOGUE[case], ("0.*",))
    if case in REFUSED[layers]:
        with pytest.raises(ConfigError) as caught:
            method.bind(TASKS[layers]())
        assert str(caught.value) == REFUSED[layers][case]
    else:
        check_method(method, task=TASKS[layers](), workers=0)


WITH_ADAM = {
    **{case: method for case, method in CATALOGUE.items() if method.settings["optimizer"] == "adam"},
    # On a dozen examples the prior would be stronger than all data.
    "vardrop, averaged": build("vardrop", lr=0.02, local_steps=4, kl_scale=0.1, sigma_lr=1.0),
}
LEARNERS = {
    case: WITH_ADAM[case] if case in WITH_ADAM else build(method.name, lr=0.3)
    for case, method in CATALOGUE.items()
    if case not in NEVER
}


def test_most_methods_can_keep_leaves_private() -> None:
    named = {"vardrop, averaged", "fedpm", "fedmask", "fedsparse", "fedensemble", "mtl", "fedmedian", "fedopt"}
    named |= {"scaffold", "feddyn", "ditto", "apfl"}
    assert named <= LEARNERS.keys()


def neighbours(leaf: Tensor) -> set[bytes]:
    """Every two values that lie side by side, as they lie in memory, but zeros, which are everywhere."""
    raw = leaf_bytes(leaf)
    pairs = {raw[i : i + 8] for i in range(0, len(raw) - 7, 4)}
    return {pair for pair in pairs if bytes(4) not in (pair[:4], pair[4:])}


def own(run: Simulation) -> dict[int, Tree]:
    """Every device's private leaves."""
    return {client: subtree("local", unpack(packed)) for client, packed in run.state.personal.items()}


@pytest.mark.parametrize("start", ["server", "own"])
@pytest.mark.parametrize("case", list(LEARNERS))
def test_private_leaves_are_learnt_and_stay_at_home(case: str, start: Any) -> None:
    sent: list[Tree] = []

    def listening(message: Tree, client: ClientInfo, key: Key) -> Tree:
        sent.append(message)
        return message

    method = KeepLocal(on_messages(LEARNERS[case], client=listening), ("0.*",), start=start)
    run = simulation(on_messages(method, client=listening), task=three_layers(), rounds=15, cohort=CLIENTS)
    begun = {
        client: subtree("local", run.method.init_client(KEY.fold_in("init_client", client))) for client in range(6)
    }
    losses: list[float] = []
    seen: list[dict[int, Tree]] = []
    for record in run:
        assert "rejections" not in record
        losses.append(record.clients["train_loss"])
        seen.append(own(run))
    # It learns.
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    # Everybody has private leaves, none has another's, and they move in every round.
    assert all(sorted(trees) == list(range(CLIENTS)) for trees in seen)
    first = subtree("local", run.state.server)
    for client in range(CLIENTS):
        states = [first if start == "server" else begun[client], *(trees[client] for trees in seen)]
        assert all(set(state) == set(PRIVATE) for state in states)
        for before, after in itertools.pairwise(states):
            assert not torch.equal(before["0.weight"], after["0.weight"])
        assert float((states[-1]["0.weight"] - states[0]["0.weight"]).abs().max()) > 0.02
    assert len({tree_sha256(tree) for tree in seen[-1].values()}) == CLIENTS
    # They predict with them.
    assert run.method.local_model is not None
    for client, packed in run.state.personal.items():
        received = run.method.broadcast(run.state.server, ClientInfo(client, 15, 0), KEY)
        model = run.method.local_model(received, unpack(packed))
        weights = [leaf for name, leaf in model.state_dict().items() if f".{name}".endswith(".0.weight")]
        assert weights
        assert all(torch.equal(leaf, seen[-1][client]["0.weight"]) for leaf in weights)
    # And nobody is told: neither what they are nor how they moved.
    assert len(sent) == 2 * 15 * CLIENTS
    assert not {name for message in sent for name in message if name.endswith(PRIVATE) or "0.log_sigma2" in name}
    moves = [
        {leaf: after[client][leaf] - before[client][leaf] for leaf in PRIVATE}
        for before, after in itertools.pairwise(seen)
        for client in after
    ]
    secrets = {pair for trees in seen for tree in trees.values() for leaf in tree.values() for pair in neighbours(leaf)}
    secrets |= {pair for tree in moves for leaf in tree.values() for pair in neighbours(leaf)}
    secrets -= {pair for leaf in first.values() for pair in neighbours(leaf)}
    assert len(secrets) > 1000
    told = {
        pair for message in sent for leaf in message.values() if leaf.is_floating_point() for pair in neighbours(leaf)
    }
    assert told.isdisjoint(secrets)


def test_a_devices_own_part_is_all_of_its_model() -> None:
    """Of multi-task learning the shared leaves, too, are each device's own; of FedAvg only the private ones are."""
    task = three_layers()
    header, private, everything = 40, num_values({name: task.spec[name] for name in PRIVATE}), num_values(task.spec)
    for method, values in ((fedavg(**SHORT), private), (mtl(**SHORT), everything)):
        run = simulation(KeepLocal(method, ("0.*",)), task=three_layers(), cohort=CLIENTS, also=(Ensemble(),))
        *_, last = run
        assert last["new_test_bytes_up"] == CLIENTS * (header + 4 * values)
    kept = unpack(run.state.personal[0])
    assert sorted(kept) == sorted(
        [*(f"local/{name}" for name in PRIVATE), *(f"inner/own/{name}" for name in task.spec if name not in PRIVATE)]
    )


@pytest.mark.parametrize("case", [case for case in LEARNERS if LEARNERS[case].bind(three_layers()).personal])
def test_what_clients_keep_is_not_forgotten_in_rounds_on_the_whole_model(case: str) -> None:
    name = LEARNERS[case].name
    for phase in ({"first_rounds": 2}, {"goal": lc.core.Goal(0.5)}):
        with pytest.raises(ConfigError) as caught:
            KeepLocal(LEARNERS[case], ("0.*",), **phase).bind(three_layers())
        assert str(caught.value) == (
            f"{name}+local: clients of {name} keep a state of their own, which the rounds on the whole model would "
            "forget; set them to 0."
        )


def test_private_leaves_are_chosen_once() -> None:
    twice = KeepLocal(KeepLocal(fedavg(**SHORT), ("0.*",)), ("2.*",))
    with pytest.raises(ConfigError, match=r"^fedavg\+local: some leaves are private already; give all of them to one"):
        twice.bind(three_layers())
    # A depth would count the layers that are left: here it would choose none, and say nothing.
    with pytest.raises(ConfigError, match=r"^lg_fedavg: some leaves are private already"):
        KeepLocal(lg_fedavg(global_layers=1, **SHORT), ("0.*",)).bind(small_task())
    once = KeepLocal(KeepLocal(fedavg(**SHORT), ()), ("0.*",))
    assert list(once.bind(three_layers()).message_spec({})) == ["2.weight", "2.bias", "4.weight", "4.bias"]


def test_wrappers_go_around_each_other() -> None:
    """Clipping inside, lies outside, private leaves in between: every seam does its part."""

    def halved(message: Tree, client: ClientInfo, key: Key) -> Tree:
        return {name: leaf / 2 for name, leaf in message.items()}

    def sent(method: Method) -> Tree:
        bound, client = method.bind(small_task(), Population(CLIENTS, 4)), ClientInfo(3, 1, 0)
        received = bound.broadcast(bound.init(KEY), client, KEY)
        with lc.core.isolated(KEY):
            return bound.client_update(received, bound.init_client(KEY), FEDERATION.client(3), client, KEY).message

    plain = KeepLocal(fedavg(**SHORT), ("0.*",))
    wrapped = Byzantine(KeepLocal(on_messages(fedavg(**SHORT), client=halved), ("0.*",)), {3}, scaled(-6.0))
    assert list(sent(plain)) == list(sent(wrapped)) == ["3.weight", "3.bias"]
    for name, leaf in sent(plain).items():
        assert torch.equal(sent(wrapped)[name], -3 * leaf)
    check_method(wrapped, workers=0)


def test_settings_of_a_wrapper_tell_its_runs_apart() -> None:
    made = [
        KeepLocal(fedavg(**SHORT), ("0.*",)),
        KeepLocal(fedavg(lr=0.2), ("0.*",)),
        KeepLocal(fedavg(**SHORT), ("3.*",)),
        KeepLocal(fedavg(**SHORT), ("0.*",), start="own"),
        KeepLocal(fedavg(**SHORT), ("0.*",), warmup_after=0),
        KeepLocal(fedavg(**SHORT), ("0.*",), first_rounds=1),
        KeepLocal(mtl(**SHORT), ("0.*",)),
    ]
    prints = [simulation(method).agreement.fingerprint for method in made]
    assert len(set(prints)) == len(made)
    assert prints[0] == simulation(KeepLocal(fedavg(**SHORT), ("0.*",))).agreement.fingerprint
