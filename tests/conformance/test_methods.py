"""The laws, over every method of the catalogue."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from laconic.codecs import parse
from laconic.core import (
    ClientInfo,
    Key,
    Method,
    Population,
    Reply,
    Task,
    Tree,
    bernoulli_names,
    drawn,
    isolated,
    sample_cohort,
    tree_sha256,
)
from laconic.engine import Agreement, Link, Schedule, Simulation, to_everyone
from laconic.engine.workers import Job, Station
from laconic.evaluations import EVALUATIONS
from laconic.methods import (
    ServerOptimizer,
    Solver,
    fedavg,
    feddrop,
    fedensemble,
    fedmedian,
    fedopt,
    fedprox,
    methods,
)
from laconic.testing import check_method, small_federation, small_task

SHORT = {"lr": 0.1, "local_epochs": 1, "batch_size": 4}
SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)
FEDERATION = small_federation()


NO_NORMALISATION = {"fedpm", "fedmask"}


def build(name: str) -> Method:
    return methods.build(name, SHORT)


def task_of(method: Method) -> Task:
    """With running statistics, wherever the method allows them."""
    return small_task(batch_norm=method.name not in NO_NORMALISATION)


def simulation(
    method: Method,
    *,
    link: str = "float32",
    task: Task | None = None,
    rounds: int = 3,
    cohort: int = 4,
    workers: int = 0,
    seed: int = 0,
) -> Simulation:
    task = task or task_of(method)
    cohort = FEDERATION.num_clients if method.bind(task).replica is not None else cohort
    schedule = Schedule(rounds=rounds, cohort=cohort, eval_every=2)
    both = Link(parse(link), parse(link))
    return Simulation(method, task, FEDERATION, both, schedule, seed=seed, workers=workers, evaluations=EVALUATIONS)


def whole(run: Simulation) -> tuple[object, ...]:
    """Everything that a run gave but the time that it took."""
    records = [{name: value for name, value in record.items() if name != "seconds"} for record in run]
    assert all("rejections" not in record for record in records)
    state = run.state
    return records, tree_sha256(state.server), list(state.server), dict(state.personal), dict(state.codec), state.ledger


# --- laws 2, 3, 4, 6 and 7 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(methods))
def test_every_method_keeps_the_laws_over_float16(name: str) -> None:
    check_method(build(name), task=task_of(build(name)), lossy="float16")


@pytest.mark.parametrize("name", list(methods))
def test_every_method_keeps_the_laws_over_few_bits(name: str) -> None:
    # Error feedback gives clients a state of the codec's, but needs messages of one shape.
    # Methods that send weights of varying shape take no sparsifier on the way down.
    per_client, ragged = build(name).bind(small_task()).per_client, is_ragged(build(name))
    few = "eden:bits=4" if per_client or ragged else "topk:fraction=0.3 | eden:bits=4"
    check_method(build(name), lossy=few if ragged else f"ef({few})")


def is_ragged(method: Method) -> bool:
    bound, client, key = method.bind(small_task()), ClientInfo(0, 1, 0), Key.from_seed(0)
    steps = bound.replica
    received = steps.first(bound.init(key)) if steps else bound.broadcast(bound.init(key), client, key)
    spec = bound.message_spec(received)
    return any(leaf.length is not None for leaf in spec.values())


@pytest.mark.parametrize("name", list(methods))
@pytest.mark.parametrize("link", ["float32", "float16", "mask"])
def test_the_number_of_workers_does_not_matter(name: str, link: str) -> None:
    alone = whole(simulation(build(name), link=link, rounds=2))
    for workers in (1, 2, 3):
        assert whole(simulation(build(name), link=link, rounds=2, workers=workers)) == alone, f"{workers} workers"


class Backwards:
    """Computes jobs from the last to the first, as slow workers might, and gives the results in order."""

    def __init__(self, run: Simulation) -> None:
        self._station = Station(run.agreement, run.clients)

    def share(self, **values: bytes) -> None:
        self._station.share(values)

    def map(self, jobs: Iterable[Job], *, count: int) -> Iterator[Any]:
        results = [job.run(self._station) for job in reversed(list(jobs))]
        assert len(results) == count
        return reversed(results)

    def figures(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", list(methods))
def test_the_order_of_arrival_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = whole(simulation(build(name)))
    run = simulation(build(name))
    pool = Backwards(run)
    # The package has a function of the same name before the module.
    monkeypatch.setattr(sys.modules["laconic.engine.simulate"], "open_pool", lambda *_, **__: pool)
    assert whole(run) == alone


@pytest.mark.parametrize("name", list(methods))
def test_the_seed_does_matter(name: str) -> None:
    assert whole(simulation(build(name)))[1] != whole(simulation(build(name), seed=1))[1]


def by_hand(method: Method, task: Task, rounds: int, cohort: int) -> Tree:
    """The algorithm without engine, codecs and bytes."""
    bound = method.bind(task, Population(FEDERATION.num_clients, cohort))
    agreement = Agreement(bound, Link(parse("float32"), parse("float32")), Key.from_seed(0))
    server = bound.init(agreement.key.fold_in("init"))
    personal: dict[int, Tree] = {}
    steps = bound.replica
    held = steps.first(server) if steps else {}
    cohort = FEDERATION.num_clients if steps else cohort
    for number in range(1, rounds + 1):
        key, replies = agreement.round_key(number), []
        held = steps.absorb(held, bound.broadcast(server, to_everyone(number), key)) if steps else held
        for c in sample_cohort(key, clients=FEDERATION.num_clients, cohort=cohort):
            client, data = ClientInfo(c, number, 0), FEDERATION.client(c)
            received = held or bound.broadcast(server, client if bound.per_client else to_everyone(number), key)
            own = personal.get(c) or bound.init_client(agreement.key.fold_in("init_client", c))
            with isolated(agreement.client_key(client).fold_in("torch")):
                update = bound.client_update(received, own, data, client, agreement.client_key(client))
            personal[c] = update.personal
            chances = bernoulli_names(bound.message_spec(received))
            message = drawn(update.message, chances, agreement.client_key(client).fold_in("mask"))
            replies.append(Reply(ClientInfo(c, number, len(data.train)), message, received))
        server = bound.server_update(server, replies, key.fold_in("server"))
    return server


@pytest.mark.parametrize("name", list(methods))
def test_an_exact_link_gives_what_the_algorithm_gives_without_an_engine(name: str) -> None:
    task = task_of(build(name))
    run = simulation(build(name), task=task)
    whole(run)
    assert tree_sha256(by_hand(build(name), task, rounds=3, cohort=4)) == tree_sha256(run.state.server)


# --- law 5: with its special ingredient switched off, a method is its parent, bit for bit ----------------------------

ADAM = ServerOptimizer("adam", lr=0.1)
PLAIN_STEP = ServerOptimizer("sgd", lr=1.0)
NOTHING_DROPPED = {"conv_rate": 0.0, "fc_rate": 0.0, "first_rate": 0.0}
PARENTS: list[tuple[str, Method, Method, int]] = [
    ("fedprox, mu 0: fedavg", fedprox(mu=0.0, solver=SOLVER), fedavg(solver=SOLVER), 4),
    ("fedopt, SGD lr 1: fedavg", fedopt(server=PLAIN_STEP, solver=SOLVER), fedavg(solver=SOLVER), 4),
    (
        "fedopt, SGD lr 1, mu: fedprox",
        fedopt(server=PLAIN_STEP, mu=0.3, solver=SOLVER),
        fedprox(mu=0.3, solver=SOLVER),
        4,
    ),
    (
        "fedensemble of 1, precision 0: fedavg",
        fedensemble(members=1, precision=0, solver=SOLVER),
        fedavg(solver=SOLVER),
        4,
    ),
    (
        "fedensemble of 1: fedprox",
        fedensemble(members=1, precision=0.3, solver=SOLVER),
        fedprox(mu=0.3, solver=SOLVER),
        4,
    ),
    (
        "fedensemble of 1 with Adam: fedopt",
        fedensemble(members=1, precision=0, server=ADAM, solver=SOLVER),
        fedopt(server=ADAM, solver=SOLVER),
        4,
    ),
    ("fedmedian, penalty 0, 1 client: fedavg", fedmedian(penalty=0, solver=SOLVER), fedavg(solver=SOLVER), 1),
    ("fedmedian, penalty 0, 2 clients: fedavg", fedmedian(penalty=0, solver=SOLVER), fedavg(solver=SOLVER), 2),
    ("feddrop, rate 0: fedavg", feddrop(**NOTHING_DROPPED, server=None, solver=SOLVER), fedavg(solver=SOLVER), 4),
    (
        "feddrop, rate 0, Adam: fedopt",
        feddrop(**NOTHING_DROPPED, server=ADAM, solver=SOLVER),
        fedopt(server=ADAM, solver=SOLVER),
        4,
    ),
]


def weights(run: Simulation) -> tuple[dict[str, str], list[float]]:
    """The server's weights by the model's own names, and the losses of all rounds."""
    losses = [record.clients["train_loss"] for record in run]
    named = {name.removeprefix("w/").removeprefix("0/"): leaf for name, leaf in run.state.server.items()}
    return {name: tree_sha256({name: named[name]}) for name in run.method.task.spec}, losses


@pytest.mark.parametrize(("child", "parent", "cohort"), [row[1:] for row in PARENTS], ids=[row[0] for row in PARENTS])
@pytest.mark.parametrize(("link", "batch_norm"), [("float32", True), ("float16", False)])
def test_switched_off_it_is_its_parent(child: Method, parent: Method, cohort: int, link: str, batch_norm: bool) -> None:
    ends = [
        weights(simulation(method, link=link, task=small_task(batch_norm=batch_norm), cohort=cohort))
        for method in (child, parent)
    ]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("child", "parent"),
    [
        (fedprox(mu=0.3, solver=SOLVER), fedavg(solver=SOLVER)),
        (fedopt(server=ADAM, solver=SOLVER), fedavg(solver=SOLVER)),
        (fedmedian(penalty=0, solver=SOLVER), fedavg(solver=SOLVER)),
        (fedmedian(penalty=1.0, solver=SOLVER), fedmedian(penalty=0, solver=SOLVER)),
        (feddrop(server=None, solver=SOLVER), fedavg(solver=SOLVER)),
    ],
)
def test_switched_on_it_is_not(child: Method, parent: Method) -> None:
    assert weights(simulation(child))[0] != weights(simulation(parent))[0]


def test_weighting_by_examples_is_uniform_where_clients_are_equal() -> None:
    class Equal:
        """Every client has the same number of examples."""

        num_clients, test, validation = 4, FEDERATION.test, FEDERATION.validation
        newcomer = None

        def client(self, client: int) -> Any:
            data = FEDERATION.client(client + 2)
            part = data.train
            return type(data)(type(part)(part.x, part.y, part.index[:8]), data.test)

    ends = []
    for method in (fedavg(solver=SOLVER), fedavg(weighting="examples", solver=SOLVER)):
        link = Link(parse("float32"), parse("float32"))
        run = Simulation(method, small_task(), Equal(), link, Schedule(rounds=3, cohort=4), seed=0, workers=0)
        ends.append(weights(run))
    assert ends[0] == ends[1]  # 8 is a power of two: nothing is rounded on its account
