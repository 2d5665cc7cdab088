"""The checks themselves: methods of one's own pass them, and whatever breaks a law is caught with its reason."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.codecs import check_codec as the_codecs_own_check
from laconic.codecs import float32
from laconic.core import (
    ALONE,
    Bound,
    ClientData,
    ClientInfo,
    Key,
    Leaf,
    Method,
    PayloadError,
    Population,
    Predictor,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    read_state,
    sample_cohort,
    spec_of,
    subtree,
)
from laconic.engine import Link, Schedule, Simulation, unpack
from laconic.evaluations import EVALUATIONS
from laconic.methods import Solver, fedavg, lg_fedavg, solve
from laconic.methods.em import predictor
from laconic.testing import (
    Byzantine,
    LawBroken,
    check_codec,
    check_method,
    identity,
    scaled,
    small_federation,
    small_task,
    with_nan,
)

SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)
PLAIN = replace(fedavg(solver=SOLVER), name="plain")
Fields = dict[str, Any]


# --- methods of one's own --------------------------------------------------------------------------------------------


def changed(change: Callable[[Bound], Fields], method: Method = PLAIN) -> Method:
    """A method some of whose functions are others, made anew for every run."""

    def bind(task: Task, population: Population = ALONE) -> Bound:
        bound = method.bind(task, population)
        return replace(bound, **change(bound))

    return replace(method, bind=bind)


class Shifted(nn.Module):
    """A model with a personal bias on its outputs."""

    def __init__(self, inner: nn.Module, bias: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.bias
        return out


def personal_bias(bound: Bound) -> Fields:
    """Everybody has a bias of its own on the outputs, which stays at home, and counts its turns."""

    def init_client(key: Key) -> Tree:
        first = torch.from_numpy(key.numpy().normal(scale=0.1, size=3)).float()
        return {"own.bias": first, "own.turns": torch.zeros((), dtype=torch.int64)}

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = bound.client_update(received, personal, data, client, key)
        x, y = data.train.tensors()
        with torch.no_grad():
            logits = local_model(received, personal)(x)
        gradient = logits.softmax(dim=1).mean(dim=0) - F.one_hot(y, 3).float().mean(dim=0)
        own = {"own.bias": personal["own.bias"] - 0.5 * gradient, "own.turns": personal["own.turns"] + 1}
        return replace(update, personal=own)

    def local_model(received: Tree, personal: Tree) -> Predictor:
        return Shifted(predictor(bound.task, received), personal["own.bias"]).eval()

    own: Fields = {"init_client": init_client, "client_update": client_update, "local_model": local_model}
    return {**own, "personal": True, "own_model": True}


def some_leaves(bound: Bound) -> Fields:
    """Every client gets, trains and answers for some leaves of the model, drawn for it anew in every round."""
    task = bound.task

    def kept(client: ClientInfo, key: Key) -> list[str]:
        draws = key.fold_in("kept", client.id).numpy().random(len(task.spec))
        names = [name for name, draw in zip(task.spec, draws, strict=True) if draw < 0.5]
        return names or list(task.spec)[:1]

    def broadcast(server: Tree, client: ClientInfo, key: Key) -> Tree:
        return {name: server[f"w/{name}"] for name in kept(client, key)}

    def broadcast_spec(client: ClientInfo, key: Key) -> Spec:
        return {name: task.spec[name] for name in kept(client, key)}

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        rest = {name: torch.zeros(leaf.shape) for name, leaf in task.spec.items()}
        module = task.load({**rest, **received})
        fitted = solve(task, data.train, SOLVER, round=client.round, key=key)
        own = read_state(module)
        message = {name: own[name] - leaf for name, leaf in received.items()}
        return Update(message, personal, module, {"train_loss": fitted.loss})

    def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        total = {name: torch.zeros_like(leaf) for name, leaf in subtree("w", server).items()}
        count = dict.fromkeys(total, 0)
        for reply in replies:
            for name, leaf in reply.message.items():
                total[name] += leaf
                count[name] += 1
        return {f"w/{name}": server[f"w/{name}"] + leaf / max(count[name], 1) for name, leaf in total.items()}

    def local_model(received: Tree, personal: Tree) -> Predictor:
        rest = {name: torch.zeros(leaf.shape) for name, leaf in task.spec.items()}
        return predictor(task, {**rest, **received})

    down: Fields = {"broadcast": broadcast, "broadcast_spec": broadcast_spec, "per_client": True}
    up: Fields = {"client_update": client_update, "message_spec": spec_of, "server_update": server_update}
    return {**down, **up, "local_model": local_model}


def mirror(bound: Bound) -> Fields:
    """FedAvg whose message looks like what was received, in that order."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = bound.client_update(received, personal, data, client, key)
        return replace(update, message={name: update.message[name] for name in received})

    return {"client_update": client_update, "message_spec": spec_of}


def _kept(tree: Tree) -> int:
    return int(tree["mask"].sum())


def largest_only(bound: Bound) -> Fields:
    """Sends a mask and the values under it: a message whose length follows from its mask."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = bound.client_update(received, personal, data, client, key)
        flat = torch.cat([leaf.flatten() for leaf in update.message.values()])
        mask = flat.abs() > flat.abs().mean()
        return replace(update, message={"values": flat[mask], "mask": mask})

    def message_spec(received: Tree) -> Spec:
        count = sum(leaf.numel() for leaf in received.values())
        return {"values": Leaf((count,), length=_kept), "mask": Leaf((count,), torch.bool)}

    def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        total, count = torch.zeros(sum(leaf.numel() for leaf in server.values())), 0
        for reply in replies:
            total[reply.message["mask"]] += reply.message["values"]
            count += 1
        parts = torch.split(total / count, [leaf.numel() for leaf in server.values()])
        return {n: leaf + part.view(leaf.shape) for (n, leaf), part in zip(server.items(), parts, strict=True)}

    return {"client_update": client_update, "message_spec": message_spec, "server_update": server_update}


PERSONAL_BIAS = replace(changed(personal_bias), name="personal_bias")
SOME_LEAVES = replace(changed(some_leaves), name="some_leaves")
LARGEST_ONLY = replace(changed(largest_only), name="largest_only")
MIRROR = changed(mirror)


@pytest.mark.parametrize("method", [PLAIN, PERSONAL_BIAS, SOME_LEAVES, LARGEST_ONLY], ids=lambda m: m.name)
@pytest.mark.parametrize("lossy", ["float16", "eden:bits=4"])
def test_a_method_of_ones_own_passes(method: Method, lossy: str) -> None:
    check_method(method, lossy=lossy)


def test_a_message_may_take_its_order_from_the_broadcast() -> None:
    check_method(MIRROR, lossy="eden:bits=4")


def test_a_message_may_take_its_order_from_a_whole_broadcast() -> None:
    check_method(MIRROR)


def test_the_check_says_nothing_and_leaves_nothing_behind() -> None:
    threads, states = torch.get_num_threads(), torch.random.get_rng_state()
    settings = dict(PLAIN.settings)
    assert check_method(PLAIN, workers=0) is None  # type: ignore[func-returns-value]
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), states)
    assert PLAIN.settings == settings


# --- personal state through the engine -------------------------------------------------------------------------------


def simulation(method: Method, *, rounds: int = 4, workers: int = 0, cohort: int = 3) -> Simulation:
    schedule, link = Schedule(rounds=rounds, cohort=cohort, eval_every=2), Link(float32(), float32())
    task, data = small_task(), small_federation()
    return Simulation(method, task, data, link, schedule, seed=0, workers=workers, evaluations=EVALUATIONS)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_engine_keeps_what_is_personal(workers: int) -> None:
    run = simulation(PERSONAL_BIAS, workers=workers)
    turns = dict.fromkeys(range(6), 0)
    for record in run:
        key = run.agreement.round_key(record["round"])
        for client in sample_cohort(key, clients=6, cohort=3):
            turns[client] += 1
        known = {client: unpack(packed) for client, packed in run.state.personal.items()}
        assert {client: int(tree["own.turns"]) for client, tree in known.items()} == {
            c: n for c, n in turns.items() if n
        }
    assert max(turns.values()) > 1
    # A client's first bias is a function of its own key: they all differ, also those who had one turn.
    assert len({tuple(tree["own.bias"].tolist()) for tree in known.values()}) == len(known)


def test_what_is_personal_is_judged_with_what_is_personal() -> None:
    run = simulation(PERSONAL_BIAS, rounds=2, cohort=6)
    last = list(run)[-1]
    assert last["local_clients"] == 6
    method, state = run.method, run.state
    assert method.local_model is not None
    scores = []
    for client in range(6):
        info = ClientInfo(client, 2, 0)
        received = method.broadcast(state.server, info, run.agreement.round_key(2))
        x, y = run.clients.client(client).test.tensors()
        with torch.no_grad():
            predicted = method.local_model(received, unpack(state.personal[client]))(x)
        scores.append(float((predicted.argmax(dim=1) == y).float().mean()))
    assert last["local_accuracy"] == pytest.approx(sum(scores) / 6, rel=1e-12)


def test_a_refused_reply_leaves_personal_state_as_it_was() -> None:
    bad = Byzantine(PERSONAL_BIAS, clients={2}, transform=with_nan)
    run = simulation(bad, rounds=2, cohort=6)
    assert [record["rejected"] for record in run] == [1, 1]
    assert sorted(run.state.personal) == [0, 1, 3, 4, 5]


# --- laws that are broken --------------------------------------------------------------------------------------------


def in_place(bound: Bound) -> Fields:
    """Trains what it received in place."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = bound.client_update(received, personal, data, client, key)
        received["0.weight"].add_(1.0)
        return update

    return {"client_update": client_update}


def in_place_but_equal(bound: Bound) -> Fields:
    """Writes what is there already: harmless today."""

    def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        torch._foreach_mul_(list(server.values()), 1.0)
        return bound.server_update(server, replies, key)

    return {"server_update": server_update}


def in_numpy(bound: Bound) -> Fields:
    """Writes to the data behind torch's back."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        data.train.x.numpy()[int(data.train.index[0])] *= 2
        return bound.client_update(received, personal, data, client, key)

    return {"client_update": client_update}


def in_model(bound: Bound) -> Fields:
    """Normalises the server's weights where they are."""

    def global_model(server: Tree) -> Predictor:
        torch.nan_to_num_(server["w/0.weight"])
        return bound.global_model(server)

    return {"global_model": global_model}


def folds_into_the_first(bound: Bound) -> Fields:
    """Adds up all messages in the first one."""

    def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        first, *rest = replies
        for reply in rest:
            for name, leaf in first.message.items():
                leaf += reply.message[name]
        return {name: leaf + first.message[name.removeprefix("w/")] / 9 for name, leaf in server.items()}

    return {"server_update": server_update}


def keeps_the_working_copy(bound: Bound) -> Fields:
    """Sends the working copy's own tensors."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = bound.client_update(received, personal, data, client, key)
        return replace(update, message=read_state(bound.task.module))

    return {"client_update": client_update}


def predicts_with_the_working_copy(bound: Bound) -> Fields:

    def global_model(server: Tree) -> Predictor:
        return bound.task.load(subtree("w", server)).eval()

    return {"global_model": global_model}


def not_ready(bound: Bound) -> Fields:

    def global_model(server: Tree) -> Predictor:
        return bound.global_model(server).train()

    return {"global_model": global_model}


def counts(bound: Bound) -> Fields:
    """Remembers its calls."""
    calls: list[int] = []

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        calls.append(client.id)
        return bound.client_update(received, personal, data, client, key.fold_in(len(calls)))

    return {"client_update": client_update}


def learns_on(bound: Bound) -> Fields:
    """Starts from wherever the client before it ended."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        solve(bound.task, data.train, SOLVER, round=1, key=key)
        own = read_state(bound.task.module)
        return Update({name: own[name] - leaf for name, leaf in received.items()})

    return {"client_update": client_update}


def draws_globally(bound: Bound) -> Fields:
    """Draws from torch's global generator, on the server, where nobody isolates it."""

    def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        new = bound.server_update(server, replies, key)
        return {name: leaf + 1e-3 * torch.randn(leaf.shape) for name, leaf in new.items()}

    return {"server_update": server_update}


def seeds_globally(bound: Bound) -> Fields:

    def init(key: Key) -> Tree:
        torch.manual_seed(0)
        return bound.init(key)

    return {"init": init}


def draws_from_numpy(bound: Bound) -> Fields:

    def broadcast(server: Tree, client: ClientInfo, key: Key) -> Tree:
        np.random.random()
        return bound.broadcast(server, client, key)

    return {"broadcast": broadcast}


def draws_from_python(bound: Bound) -> Fields:

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        random.random()
        return bound.client_update(received, personal, data, client, key)

    return {"client_update": client_update}


def leaks(bound: Bound) -> Fields:
    """Sends what should stay at home, under its own name."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = bound.client_update(received, personal, data, client, key)
        return replace(update, message={**update.message, "own.bias": update.personal["own.bias"]})

    def message_spec(received: Tree) -> Spec:
        return {**bound.message_spec(received), "own.bias": Leaf((3,))}

    return {"client_update": client_update, "message_spec": message_spec}


def secretive(bound: Bound) -> Fields:
    return {"personal": False}


def modelless(bound: Bound) -> Fields:
    """Promises models of clients' own, and has none."""
    return {"local_model": None}


def other_order(bound: Bound) -> Fields:
    """The right leaves in another order than the spec has: bytes would be taken for those of another leaf."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = bound.client_update(received, personal, data, client, key)
        return replace(update, message=dict(reversed(update.message.items())))

    return {"client_update": client_update}


def other_type(bound: Bound) -> Fields:

    def broadcast(server: Tree, client: ClientInfo, key: Key) -> Tree:
        return {name: leaf.double() for name, leaf in bound.broadcast(server, client, key).items()}

    return {"broadcast": broadcast}


def one_leaf_short(bound: Bound) -> Fields:

    def message_spec(received: Tree) -> Spec:
        spec = dict(bound.message_spec(received))
        spec.popitem()
        return spec

    return {"message_spec": message_spec}


def addresses_its_clients(bound: Bound) -> Fields:
    """Sends every client something else, but says that it does not."""

    def broadcast(server: Tree, client: ClientInfo, key: Key) -> Tree:
        return {n: leaf * (1 + client.id % 7) for n, leaf in bound.broadcast(server, client, key).items()}

    return {"broadcast": broadcast}


def goes_through_twice(bound: Bound) -> Fields:
    """Takes replies for a list."""

    def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        count, new = sum(1 for _ in replies), dict(server)
        for reply in replies:
            for name, leaf in reply.message.items():
                new[f"w/{name}"] = new[f"w/{name}"] + leaf / count
        return new

    return {"server_update": server_update}


def diverges(bound: Bound) -> Fields:

    def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        return {name: leaf / 0 for name, leaf in bound.server_update(server, replies, key).items()}

    return {"server_update": server_update}


def papers_in_fractions(bound: Bound) -> Fields:

    def paper_bytes(received: Tree, message: Tree) -> int:
        return 0.5  # type: ignore[return-value]

    return {"paper_bytes": paper_bytes}


def fails_later(bound: Bound) -> Fields:
    """Works in the first rounds only."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        if client.round > 2:
            raise PayloadError("failed", "too late")
        return bound.client_update(received, personal, data, client, key)

    return {"client_update": client_update}


def forgets(bound: Bound) -> Fields:
    """Keeps something of the first round in itself and not in the server's state: gone after an interruption."""
    first: list[Key] = []

    def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        if not first:
            first.append(key)
        scale = 1 + 1e-3 * first[0].numpy().random()
        return {name: leaf * scale for name, leaf in bound.server_update(server, replies, key).items()}

    return {"server_update": server_update}


class Doubling(dict[str, Tensor]):
    """A message that is no plain tree: whoever asks for a leaf gets twice what a copy would hold."""

    def __getitem__(self, name: str) -> Tensor:
        return 2 * dict.__getitem__(self, name)


def more_than_a_tree(bound: Bound) -> Fields:
    """Its messages change when they are copied, as a wrapper may do."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = bound.client_update(received, personal, data, client, key)
        return replace(update, message=Doubling(update.message))

    return {"client_update": client_update}


BROKEN: list[tuple[Callable[[Bound], Fields], str]] = [
    (in_place, "plain, law 4: client_update writes to its input 'received 0.weight'."),
    (in_place_but_equal, "plain, law 4: server_update writes to its input 'state w/0.weight'."),
    (in_numpy, "plain, law 4: client_update changed its input 'data train.x'."),
    (in_model, "plain, law 4: global_model writes to its input 'w/0.weight'."),
    (folds_into_the_first, "plain, law 4: server_update writes to its input 'message of 0 0.weight'."),
    (
        keeps_the_working_copy,
        "plain, law 4: what client 0 made changed when other clients were trained: does it share",
    ),
    (
        predicts_with_the_working_copy,
        "plain, law 4: what global_model predicts changed when a client was trained: is it",
    ),
    (not_ready, "plain: global_model must be ready to predict: call eval()."),
    (counts, "plain, law 2: client_update with the same key and inputs gave something else."),
    (learns_on, "plain, law 2: client_update with the same key and inputs gave something else."),
    (draws_globally, "plain, law 2: server_update uses a global generator; draw from the key instead."),
    (seeds_globally, "plain, law 2: init uses a global generator; draw from the key instead."),
    (draws_from_numpy, "plain, law 2: broadcast uses a global generator; draw from the key instead."),
    (draws_from_python, "plain, law 2: client_update uses a global generator; draw from the key instead."),
    (leaks, "personal_bias, law 3: the message holds ['own.bias'], which are names of personal state."),
    (secretive, "personal_bias: personal is False, but clients keep ['own.bias', 'own.turns']."),
    (modelless, "personal_bias: own_model is True, but there is no local_model."),
    (
        other_order,
        "plain: the message is 3.bias:float32[3];3.weight:float32[3,6];0.bias:float32[6];0.weight:float32[6,4],",
    ),
    (other_type, "plain: the broadcast is 0.weight:float64[6,4];"),
    (
        one_leaf_short,
        "plain: the message is 0.weight:float32[6,4];0.bias:float32[6];3.weight:float32[3,6];3.bias:float32[3],",
    ),
    (addresses_its_clients, "plain, law 2: the broadcast depends on the client, but per_client is False."),
    (goes_through_twice, "plain: server_update gives something else for a list than for an iterator: go through"),
    (diverges, "plain: the server's new state is not finite."),
    (papers_in_fractions, "plain: paper_bytes must be a whole number and not negative, got 0.5."),
    (fails_later, "plain, law 6: the reply of client "),
    (forgets, "plain, law 7: a run that was resumed ended with another server state than it should (over float16)."),
    (more_than_a_tree, "plain, law 8: a run of its identity wrapper ended with another server state than it should."),
]


@pytest.mark.parametrize(("change", "said"), BROKEN, ids=[change.__name__ for change, _ in BROKEN])
def test_a_broken_law_is_named(change: Callable[[Bound], Fields], said: str) -> None:
    with pytest.raises(LawBroken) as caught:
        check_method(changed(change, PERSONAL_BIAS if said.startswith("personal_bias") else PLAIN))
    assert str(caught.value).startswith(said)


def test_what_differs_between_processes_is_caught() -> None:
    parent = os.getpid()

    def where_am_i(bound: Bound) -> Fields:
        def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
            update = bound.client_update(received, personal, data, client, key)
            return replace(update, message=scaled(1.0 if os.getpid() == parent else 2.0)(update.message))

        return {"client_update": client_update}

    check_method(changed(where_am_i), workers=0)
    with pytest.raises(LawBroken, match="law 2: a run with 2 workers ended with another server state"):
        check_method(changed(where_am_i), workers=2)


def test_an_error_of_the_method_is_passed_on_with_a_note() -> None:
    def fails(bound: Bound) -> Fields:
        def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
            raise ZeroDivisionError("mine")

        return {"server_update": server_update}

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        check_method(changed(fails))
    assert caught.value.__notes__ == [
        "(in server_update of the method 'plain', called by laconic.testing.check_method)"
    ]


def test_something_that_is_no_method() -> None:
    class Nothing:
        name = "nothing"

    with pytest.raises(LawBroken, match=r"^it is no Method, but of the type Nothing\.$"):
        check_method(Nothing())  # type: ignore[arg-type]
    with pytest.raises(LawBroken, match=r"^it is no Method, but of the type Bound\.$"):
        check_method(PLAIN.bind(small_task()))  # type: ignore[arg-type]


def test_a_method_binds_to_a_record_of_the_task_that_it_was_given() -> None:
    other = small_task()
    for bind, said in (
        (lambda task, population=ALONE: PLAIN, "plain: bind must give a Bound, got Method."),
        (lambda task, population=ALONE: PLAIN.bind(other), "plain: after bind(task), `task` must be that task."),
    ):
        with pytest.raises(LawBroken) as caught:
            check_method(replace(PLAIN, bind=bind))
        assert str(caught.value) == said


@pytest.mark.parametrize("settings", [{"solver": SOLVER}, {"lr": float("nan")}, {"leaves": {"0.*"}}], ids=str)
def test_settings_are_plain_json(settings: dict[str, Any]) -> None:
    with pytest.raises(LawBroken, match=r"^plain: its settings are no plain JSON \(.*\)\.$"):
        check_method(replace(PLAIN, settings=settings))


def test_a_wrapper_that_changes_nothing_leaves_the_rest_alone() -> None:
    wrapped = identity(PERSONAL_BIAS)
    assert (wrapped.name, wrapped.settings, wrapped.link) == ("personal_bias", PLAIN.settings, PLAIN.link)
    check_method(wrapped, workers=0)


def test_an_interruption_is_no_end() -> None:
    """A last round is judged, which may end a phase: a run that is interrupted there must not be taken for one."""
    check_method(lg_fedavg(goal=0.3, goal_on="test", solver=SOLVER), workers=0)


def test_a_law_that_is_broken_is_an_assertion() -> None:
    assert issubclass(LawBroken, AssertionError)


def test_check_codec_is_the_codecs_own() -> None:
    assert check_codec is the_codecs_own_check


# --- clients that misbehave ------------------------------------------------------------------------------------------


def test_transforms_leave_their_message_alone() -> None:
    message = {"w": torch.ones(3), "count": torch.tensor([2]), "empty": torch.zeros(0)}
    spoilt = with_nan(message)
    assert spoilt["w"].isnan().tolist() == [False, False, True]
    assert scaled(-2.0)(message)["w"].tolist() == [-2.0, -2.0, -2.0]
    assert message["w"].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(spoilt["count"], message["count"])


@pytest.mark.parametrize("method", [fedavg(solver=SOLVER), PERSONAL_BIAS, SOME_LEAVES], ids=lambda m: m.name)
def test_byzantine_clients_keep_the_laws_themselves(method: Method) -> None:
    check_method(Byzantine(method, clients={1, 3}, transform=scaled(-2.0)), workers=0)


def test_only_the_chosen_clients_lie() -> None:
    honest, task, federation = fedavg(solver=SOLVER), small_task(), small_federation()
    liar = Byzantine(honest, clients={1}, transform=scaled(-100))
    key = Key.from_seed(0)
    assert (liar.name, liar.settings, liar.link) == (honest.name, honest.settings, honest.link)
    assert (liar.bind(task).personal, liar.bind(task).per_client) == (False, False)
    for client in (0, 1):
        sent = []
        for method in (honest.bind(task), liar.bind(task)):
            received = method.broadcast(method.init(key), ClientInfo(client, 1, 0), key)
            torch.manual_seed(0)
            update = method.client_update(received, {}, federation.client(client), ClientInfo(client, 1, 0), key)
            sent.append(update.message["0.weight"])
        assert torch.equal(sent[1], sent[0] if client == 0 else -100 * sent[0])


def test_small_things_are_small_and_repeatable() -> None:
    one, other = small_federation(), small_federation()
    assert torch.equal(one.x, other.x)
    assert not torch.equal(one.x, small_federation(seed=1).x)
    assert [len(one.client(c).train) for c in range(one.num_clients)] == [2, 5, 8, 11, 14, 17]
    assert all(len(one.client(c).test) == 4 for c in range(one.num_clients))
    assert "1.running_var" in small_task(batch_norm=True).spec
