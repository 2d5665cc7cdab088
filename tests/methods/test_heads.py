"""FedPer, FedRep, FedBABU: one private head, three schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.core import ClientInfo, ConfigError, Key, Method, isolated, prefixed, read_state, subtree
from laconic.methods import (
    KeepLocal,
    Solver,
    apfl,
    ditto,
    fedavg,
    fedbabu,
    feddyn,
    fedper,
    fedrep,
    scaffold,
    solve,
)
from laconic.testing import check_method, small_federation, small_task

SOLVER = Solver(lr=0.1, local_epochs=2, batch_size=4)
KEY = Key.from_seed(0)
CLIENT = ClientInfo(4, 1, 0)
HEADS = [fedper, fedrep, fedbabu]


@pytest.mark.parametrize("method", HEADS)
def test_the_last_layers_stay_on_the_device(method: Any) -> None:
    task = small_task(batch_norm=True)
    assert list(method().bind(task).message_spec({})) == [n for n in task.moving if not n.startswith("4.")]
    assert list(method(private_layers=2).bind(task).message_spec({})) == ["0.weight", "0.bias"]
    with pytest.raises(ConfigError, match=rf"{method.__name__}: every leaf that is trained would be private"):
        method(private_layers=3).bind(task)
    with pytest.raises(ConfigError, match="private layers must not be negative"):
        method(private_layers=-1)


@pytest.mark.parametrize("method", HEADS)
def test_without_a_head_of_one_s_own_it_is_fedavg(ended: Any, same: Any, method: Any) -> None:
    plain, run = ended(fedavg(solver=SOLVER)), ended(method(private_layers=0, solver=SOLVER))
    assert same(run.server, plain.server)


def test_fedper_trains_both_parts_together(ended: Any, same: Any) -> None:
    run, by_name = (ended(m) for m in (fedper(solver=SOLVER), KeepLocal(fedavg(solver=SOLVER), ("4.*",))))
    assert same(run.server, by_name.server)
    assert all(same(kept, by_name.personal[client]) for client, kept in run.personal.items())


def test_fedbabu_never_trains_a_head(ended: Any, same: Any) -> None:
    run = ended(fedbabu(solver=SOLVER))
    bound: Any = fedbabu(solver=SOLVER).bind(run.task)
    first = subtree("local", run.server)
    assert all(same(subtree("local", kept), first) for kept in run.personal.values())
    start = run.task.init(KEY)
    assert first.keys() == {"4.weight", "4.bias"}
    assert not torch.equal(run.server["part/w/0.weight"], start["0.weight"])  # the body is trained
    received = bound.broadcast(run.server, CLIENT, KEY)
    own, common = bound.local_model(received, run.personal[5]), bound.global_model(run.server)
    assert same(read_state(own), read_state(common))


def test_fedrep_fits_the_head_then_the_body(same: Any) -> None:
    task, data = small_task(), small_federation().client(4)
    rep: Any = fedrep(head_epochs=3, solver=SOLVER).bind(task)
    received = rep.broadcast(rep.init(KEY), CLIENT, KEY)
    with isolated(KEY):
        update = rep.client_update(received, {}, data, CLIENT, KEY)
        after = torch.get_rng_state()
    # The head by itself, over a body that is still the server's …
    names = ("3.weight", "3.bias")
    part = task.keeping(names)
    body = {name: received[name] for name in part.spec}
    head = {name: received[f"local/{name}"].reshape(task.spec[name].shape) for name in names}
    with isolated(KEY), part.held(head):
        part.load(body)
        alone = Solver(lr=0.1, local_epochs=3, batch_size=4)
        solve(part, data.train, alone, round=1, key=KEY.fold_in("warmup"), private_only=True)
        fitted = dict(part.private)
        # … and then the body under that head, as FedBABU trains it.
        babu = fedbabu(solver=SOLVER).bind(task)
        second = babu.client_update(received, prefixed("local", fitted), data, CLIENT, KEY)
        assert torch.equal(torch.get_rng_state(), after)
    assert same(subtree("local", update.personal), fitted)
    assert not same(fitted, head)
    assert same(update.message, second.message)


def test_fedrep_without_epochs_for_heads_is_fedbabu(ended: Any, same: Any) -> None:
    rep, babu = ended(fedrep(head_epochs=0, solver=SOLVER)), ended(fedbabu(solver=SOLVER))
    assert same(rep.server, babu.server)


@pytest.mark.parametrize(
    "method", [*(make(solver=SOLVER) for make in HEADS), fedrep(start="own", solver=SOLVER)], ids=lambda m: m.name
)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_laws(method: Method, batch_norm: bool) -> None:
    check_method(method, task=small_task(batch_norm=batch_norm), lossy="ef(eden:bits=4)")


@pytest.mark.parametrize("inner", [scaffold, feddyn, ditto, apfl])
def test_methods_with_companions_keep_the_laws_under_a_private_head(inner: Any) -> None:
    check_method(KeepLocal(inner(solver=SOLVER), ("4.*",)), task=small_task(batch_norm=True), lossy="ef(eden:bits=4)")
