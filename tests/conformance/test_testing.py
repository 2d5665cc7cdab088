"""The checks themselves: methods of one's own pass them, and whatever breaks a law is caught with its reason."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.codecs import check_codec as the_codecs_own_check
from laconic.codecs import float32
from laconic.core import (
    ClientData,
    ClientInfo,
    Key,
    Leaf,
    Predictor,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    read_state,
    spec_of,
    subtree,
)
from laconic.engine import Link, Schedule, Simulation, sample_cohort, unpack
from laconic.methods import EM, Gaussian, Solver, fedavg, fit
from laconic.methods.em import predictor
from laconic.testing import (
    Byzantine,
    LawBroken,
    check_codec,
    check_method,
    scaled,
    small_federation,
    small_task,
    with_nan,
)

GAUSSIAN = Gaussian()
SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)


# --- methods of one's own --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain(EM):
    """FedAvg, to be spoilt in one place."""

    name: str = "plain"
    prior: Gaussian = GAUSSIAN
    solver: Solver = SOLVER


class Shifted(nn.Module):
    """A model with a personal bias on its outputs."""

    def __init__(self, inner: nn.Module, bias: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.bias
        return out


@dataclass(frozen=True)
class PersonalBias(Plain):
    """Everybody has a bias of its own on the outputs, which stays at home, and counts its turns."""

    name: str = "personal_bias"
    stateful = True

    def init_client(self, key: Key) -> Tree:
        first = torch.from_numpy(key.numpy().normal(scale=0.1, size=3)).float()
        return {"own.bias": first, "own.turns": torch.zeros((), dtype=torch.int64)}

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = EM.client_update(self, received, personal, data, client, key)
        x, y = data.train.tensors()
        with torch.no_grad():
            logits = self.local_model(received, personal)(x)
        gradient = logits.softmax(dim=1).mean(dim=0) - F.one_hot(y, 3).float().mean(dim=0)
        own = {"own.bias": personal["own.bias"] - 0.5 * gradient, "own.turns": personal["own.turns"] + 1}
        return replace(update, personal=own)

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        return Shifted(predictor(self.task, received), personal["own.bias"]).eval()


@dataclass(frozen=True)
class SomeLeaves(Plain):
    """Every client gets, trains and answers for some leaves of the model, drawn for it anew in every round."""

    name: str = "some_leaves"
    per_client = True

    def kept(self, client: ClientInfo, key: Key) -> list[str]:
        draws = key.fold_in("kept", client.id).numpy().random(len(self.task.spec))
        names = [name for name, draw in zip(self.task.spec, draws, strict=True) if draw < 0.5]
        return names or list(self.task.spec)[:1]

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        return {name: server[f"w/{name}"] for name in self.kept(client, key)}

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        return {name: self.task.spec[name] for name in self.kept(client, key)}

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        rest = {name: torch.zeros(leaf.shape) for name, leaf in self.task.spec.items()}
        module = self.task.load({**rest, **received})
        fitted = fit(self.task, data.train, self.solver, round=client.round, key=key)
        own = read_state(module)
        message = {name: own[name] - leaf for name, leaf in received.items()}
        return Update(message, personal, module, {"train_loss": fitted.loss})

    def message_spec(self, received: Tree) -> Spec:
        return spec_of(received)

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        total = {name: torch.zeros_like(leaf) for name, leaf in subtree("w", server).items()}
        count = dict.fromkeys(total, 0)
        for reply in replies:
            for name, leaf in reply.message.items():
                total[name] += leaf
                count[name] += 1
        return {f"w/{name}": server[f"w/{name}"] + leaf / max(count[name], 1) for name, leaf in total.items()}

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        rest = {name: torch.zeros(leaf.shape) for name, leaf in self.task.spec.items()}
        return predictor(self.task, {**rest, **received})


@dataclass(frozen=True)
class Mirror(Plain):
    """FedAvg whose message looks like what was received, in that order."""

    name: str = "mirror"

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = EM.client_update(self, received, personal, data, client, key)
        return replace(update, message={name: update.message[name] for name in received})

    def message_spec(self, received: Tree) -> Spec:
        return spec_of(received)


def _kept(tree: Tree) -> int:
    return int(tree["mask"].sum())


@dataclass(frozen=True)
class LargestOnly(Plain):
    """Sends a mask and the values under it: a message whose length follows from its mask."""

    name: str = "largest_only"

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = EM.client_update(self, received, personal, data, client, key)
        flat = torch.cat([leaf.flatten() for leaf in update.message.values()])
        mask = flat.abs() > flat.abs().mean()
        return replace(update, message={"values": flat[mask], "mask": mask})

    def message_spec(self, received: Tree) -> Spec:
        count = sum(leaf.numel() for leaf in received.values())
        return {"values": Leaf((count,), length=_kept), "mask": Leaf((count,), torch.bool)}

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        total, count = torch.zeros(sum(leaf.numel() for leaf in server.values())), 0
        for reply in replies:
            total[reply.message["mask"]] += reply.message["values"]
            count += 1
        parts = torch.split(total / count, [leaf.numel() for leaf in server.values()])
        return {n: leaf + part.view(leaf.shape) for (n, leaf), part in zip(server.items(), parts, strict=True)}


@pytest.mark.parametrize("method", [Plain(), PersonalBias(), SomeLeaves(), LargestOnly()], ids=lambda m: m.name)
@pytest.mark.parametrize("lossy", ["float16", "eden:bits=4"])
def test_a_method_of_ones_own_passes(method: EM, lossy: str) -> None:
    check_method(method, lossy=lossy)


def test_a_message_may_take_its_order_from_the_broadcast() -> None:
    check_method(Mirror(), lossy="eden:bits=4")


def test_a_message_may_take_its_order_from_a_whole_broadcast() -> None:
    check_method(Mirror())


def test_the_check_says_nothing_and_leaves_nothing_behind() -> None:
    threads, states = torch.get_num_threads(), torch.random.get_rng_state()
    method = Plain()
    assert check_method(method, workers=0) is None  # type: ignore[func-returns-value]
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), states)
    assert method == Plain()


# --- personal state through the engine -------------------------------------------------------------------------------


def simulation(method: Any, *, rounds: int = 4, workers: int = 0, cohort: int = 3) -> Simulation:
    schedule = Schedule(rounds=rounds, cohort=cohort, workers=workers, eval_every=2)
    return Simulation(method, small_task(), small_federation(), Link(float32(), float32()), schedule, seed=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_engine_keeps_what_is_personal(workers: int) -> None:
    run = simulation(PersonalBias(), workers=workers)
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
    run = simulation(PersonalBias(), rounds=2, cohort=6)
    last = list(run)[-1]
    assert last["local_clients"] == 6
    method, state = run.method, run.state
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
    bad = Byzantine(PersonalBias(), clients={2}, transform=with_nan)
    run = simulation(bad, rounds=2, cohort=6)
    assert [record["rejected"] for record in run] == [1, 1]
    assert sorted(run.state.personal) == [0, 1, 3, 4, 5]


# --- laws that are broken --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InPlace(Plain):
    """Trains what it received in place."""

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = EM.client_update(self, received, personal, data, client, key)
        received["0.weight"].add_(1.0)
        return update


@dataclass(frozen=True)
class InPlaceButEqual(Plain):
    """Writes what is there already: harmless today."""

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        torch._foreach_mul_(list(server.values()), 1.0)
        return EM.server_update(self, server, replies, key)


@dataclass(frozen=True)
class InNumpy(Plain):
    """Writes to the data behind torch's back."""

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        data.train.x.numpy()[int(data.train.index[0])] *= 2
        return EM.client_update(self, received, personal, data, client, key)


@dataclass(frozen=True)
class InModel(Plain):
    """Normalises the server's weights where they are."""

    def global_model(self, server: Tree) -> Predictor:
        torch.nan_to_num_(server["w/0.weight"])
        return EM.global_model(self, server)


@dataclass(frozen=True)
class FoldsIntoTheFirst(Plain):
    """Adds up all messages in the first one."""

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        first, *rest = replies
        for reply in rest:
            for name, leaf in first.message.items():
                leaf += reply.message[name]
        return {name: leaf + first.message[name.removeprefix("w/")] / 9 for name, leaf in server.items()}


@dataclass(frozen=True)
class KeepsTheWorkingCopy(Plain):
    """Sends the working copy's own tensors."""

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = EM.client_update(self, received, personal, data, client, key)
        return replace(update, message=read_state(self.task.module))


@dataclass(frozen=True)
class PredictsWithTheWorkingCopy(Plain):
    def global_model(self, server: Tree) -> Predictor:
        return self.task.load(subtree("w", server)).eval()


@dataclass(frozen=True)
class NotReady(Plain):
    def global_model(self, server: Tree) -> Predictor:
        return EM.global_model(self, server).train()


@dataclass(frozen=True)
class Counts(Plain):
    """Remembers its calls."""

    calls: list[int] = field(default_factory=list)

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        self.calls.append(client.id)
        return EM.client_update(self, received, personal, data, client, key.fold_in(len(self.calls)))


@dataclass(frozen=True)
class LearnsOn(Plain):
    """Starts from wherever the client before it ended."""

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        fit(self.task, data.train, self.solver, round=1, key=key)
        own = read_state(self.task.module)
        return Update({name: own[name] - leaf for name, leaf in received.items()})


@dataclass(frozen=True)
class DrawsGlobally(Plain):
    """Draws from torch's global generator, on the server, where nobody isolates it."""

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        new = EM.server_update(self, server, replies, key)
        return {name: leaf + 1e-3 * torch.randn(leaf.shape) for name, leaf in new.items()}


@dataclass(frozen=True)
class SeedsGlobally(Plain):
    def init(self, key: Key) -> Tree:
        torch.manual_seed(0)
        return EM.init(self, key)


@dataclass(frozen=True)
class DrawsFromNumpy(Plain):
    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        np.random.random()
        return EM.broadcast(self, server, client, key)


@dataclass(frozen=True)
class DrawsFromPython(Plain):
    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        random.random()
        return EM.client_update(self, received, personal, data, client, key)


@dataclass(frozen=True)
class Leaks(PersonalBias):
    """Sends what should stay at home, under its own name."""

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = PersonalBias.client_update(self, received, personal, data, client, key)
        return replace(update, message={**update.message, "own.bias": update.personal["own.bias"]})

    def message_spec(self, received: Tree) -> Spec:
        return {**EM.message_spec(self, received), "own.bias": Leaf((3,))}


@dataclass(frozen=True)
class Secretive(PersonalBias):
    stateful = False


@dataclass(frozen=True)
class OtherOrder(Plain):
    """The right leaves in another order than the spec has: bytes would be taken for those of another leaf."""

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = EM.client_update(self, received, personal, data, client, key)
        return replace(update, message=dict(reversed(update.message.items())))


@dataclass(frozen=True)
class OtherType(Plain):
    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        return {name: leaf.double() for name, leaf in EM.broadcast(self, server, client, key).items()}


@dataclass(frozen=True)
class OneLeafShort(Plain):
    def message_spec(self, received: Tree) -> Spec:
        spec = EM.message_spec(self, received)
        spec = dict(spec)
        spec.popitem()
        return spec


@dataclass(frozen=True)
class AddressesItsClients(Plain):
    """Sends every client something else, but says that it does not."""

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        return {n: leaf * (1 + client.id % 7) for n, leaf in EM.broadcast(self, server, client, key).items()}


@dataclass(frozen=True)
class GoesThroughTwice(Plain):
    """Takes replies for a list."""

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        count, new = sum(1 for _ in replies), dict(server)
        for reply in replies:
            for name, leaf in reply.message.items():
                new[f"w/{name}"] = new[f"w/{name}"] + leaf / count
        return new


@dataclass(frozen=True)
class Diverges(Plain):
    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        return {name: leaf / 0 for name, leaf in EM.server_update(self, server, replies, key).items()}


@dataclass(frozen=True)
class PapersInFractions(Plain):
    def metrics(self, server: Tree) -> dict[str, float]:
        return {}

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        return 0.5  # type: ignore[return-value]


@dataclass(frozen=True)
class FailsLater(Plain):
    """Works in the first round only."""

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        if client.round > 2:
            raise ValueError("too late")
        return EM.client_update(self, received, personal, data, client, key)


@dataclass(frozen=True)
class Forgets(Plain):
    """Keeps something of the first round in itself and not in the server's state: gone after an interruption."""

    first: list[Key] = field(default_factory=list)

    def bind(self, task: Task) -> Forgets:
        return replace(self, bound=task, first=[])  # every run begins anew

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        if not self.first:
            self.first.append(key)
        scale = 1 + 1e-3 * self.first[0].numpy().random()
        return {name: leaf * scale for name, leaf in EM.server_update(self, server, replies, key).items()}


BROKEN: list[tuple[Any, str]] = [
    (InPlace(), "plain, law 4: client_update writes to its input 'received 0.weight'."),
    (InPlaceButEqual(), "plain, law 4: server_update writes to its input 'state w/0.weight'."),
    (InNumpy(), "plain, law 4: client_update changed its input 'data train.x'."),
    (InModel(), "plain, law 4: global_model writes to its input 'w/0.weight'."),
    (FoldsIntoTheFirst(), "plain, law 4: server_update writes to its input 'message of 0 0.weight'."),
    (
        KeepsTheWorkingCopy(),
        "plain, law 4: what client 0 made changed when other clients had their turn: does it share",
    ),
    (
        PredictsWithTheWorkingCopy(),
        "plain, law 4: what global_model predicts changed when a client had its turn: is it",
    ),
    (NotReady(), "plain: global_model must be ready to predict: call eval()."),
    (Counts(), "plain, law 2: client_update with the same key and inputs gave something else."),
    (LearnsOn(), "plain, law 2: client_update with the same key and inputs gave something else."),
    (DrawsGlobally(), "plain, law 2: server_update uses a global generator; draw from the key instead."),
    (SeedsGlobally(), "plain, law 2: init uses a global generator; draw from the key instead."),
    (DrawsFromNumpy(), "plain, law 2: broadcast uses a global generator; draw from the key instead."),
    (DrawsFromPython(), "plain, law 2: client_update uses a global generator; draw from the key instead."),
    (Leaks(), "personal_bias, law 3: the message holds ['own.bias'], which are names of personal state."),
    (Secretive(), "personal_bias: stateful is False, but clients keep ['own.bias', 'own.turns']."),
    (
        OtherOrder(),
        "plain: the message is 3.bias:float32[3];3.weight:float32[3,6];0.bias:float32[6];0.weight:float32[6,4],",
    ),
    (OtherType(), "plain: the broadcast is 0.weight:float64[6,4];"),
    (
        OneLeafShort(),
        "plain: the message is 0.weight:float32[6,4];0.bias:float32[6];3.weight:float32[3,6];3.bias:float32[3],",
    ),
    (AddressesItsClients(), "plain, law 2: the broadcast depends on the client, but per_client is False."),
    (GoesThroughTwice(), "plain: server_update gives something else for a list than for an iterator: go through"),
    (Diverges(), "plain: the server's new state is not finite."),
    (PapersInFractions(), "plain: paper_bytes must be a whole number and not negative, got 0.5."),
    (FailsLater(), "plain, law 6: the reply of client "),
    (Forgets(), "plain, law 7: a run that was resumed ended with another server state than it should (over float16)."),
]


@pytest.mark.parametrize(("method", "said"), BROKEN, ids=[type(method).__name__ for method, _ in BROKEN])
def test_a_broken_law_is_named(method: Any, said: str) -> None:
    with pytest.raises(LawBroken) as caught:
        check_method(method)
    assert str(caught.value).startswith(said)


def test_what_differs_between_processes_is_caught() -> None:
    parent = os.getpid()

    @dataclass(frozen=True)
    class WhereAmI(Plain):
        def client_update(
            self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key
        ) -> Update:
            update = EM.client_update(self, received, personal, data, client, key)
            return replace(update, message=scaled(1.0 if os.getpid() == parent else 2.0)(update.message))

    check_method(WhereAmI(), workers=0)
    with pytest.raises(LawBroken, match="law 2: a run with 2 workers ended with another server state"):
        check_method(WhereAmI(), workers=2)


def test_an_error_of_the_method_is_passed_on_with_a_note() -> None:
    @dataclass(frozen=True)
    class Fails(Plain):
        def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        check_method(Fails())
    assert caught.value.__notes__ == [
        "(in server_update of the method 'plain', called by laconic.testing.check_method)"
    ]


def test_something_that_is_no_method() -> None:
    class Nothing:
        name = "nothing"

    with pytest.raises(LawBroken, match=r"^nothing: it is no Method, for it has no stateful, per_client, task, bind, "):
        check_method(Nothing())  # type: ignore[arg-type]


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


@pytest.mark.parametrize("method", [fedavg(solver=SOLVER), PersonalBias(), SomeLeaves()], ids=lambda m: m.name)
def test_byzantine_clients_keep_the_laws_themselves(method: Any) -> None:
    check_method(Byzantine(method, clients={1, 3}, transform=scaled(-2.0)), workers=0)


def test_only_the_chosen_clients_lie() -> None:
    honest, task, federation = fedavg(solver=SOLVER), small_task(), small_federation()
    liar = Byzantine(honest, clients={1}, transform=scaled(-100))
    key = Key.from_seed(0)
    assert (liar.name, liar.stateful, liar.per_client) == ("fedavg", False, False)
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
