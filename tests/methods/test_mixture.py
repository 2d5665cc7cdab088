from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from laconic.core import ClientData, ClientInfo, ConfigError, Key, Part, Task, Tree, prefixed, subtree, tree_sha256
from laconic.methods import Mixture, Solver, Vote, fedensemble, responsibilities
from laconic.models import Ensemble
from laconic.testing import small_federation, small_task

KEY = Key.from_seed(0)
FEDERATION = small_federation()


def centres(mixture: Mixture, task: Task, *, spread: float = 1.0, dtype: torch.dtype = torch.float64) -> Tree:
    centre = mixture.init(task, KEY)
    return {name: (leaf * spread).to(dtype) for name, leaf in centre.items()}


def some_votes(mixture: Mixture, centre: Tree, task: Task, *, clients: int, spread: float) -> list[Vote]:
    """Clients that ended somewhere around the centre that they started from."""
    votes = []
    for s in range(clients):
        rng = KEY.fold_in("votes", s).torch()
        start = subtree(str(s % mixture.members), centre)
        away = {n: spread * torch.randn(leaf.shape, generator=rng, dtype=leaf.dtype) for n, leaf in start.items()}
        votes.append(Vote(1.0 + s % 3, {**away, "#member": torch.tensor([s % mixture.members], dtype=torch.uint8)}))
    return votes


def log_density(mixture: Mixture, centre: Tree, phi: Tree, names: tuple[str, ...], precision: float) -> Tensor:
    """log Σ_k exp(−λ/2 ‖φ − w_k‖²), plainly."""
    distances = [sum((phi[n] - centre[f"{k}/{n}"]).square().sum() for n in names) for k in range(mixture.members)]
    return torch.logsumexp(torch.stack([-0.5 * precision * torch.as_tensor(d) for d in distances]), dim=0)


def precision_of(mixture: Mixture, task: Task) -> float:
    count = sum(task.spec[name].size for name in task.trainable)
    return mixture.precision / count if mixture.normalized else mixture.precision


MIXTURES = [
    Mixture(1, 0.5),
    Mixture(3, 0.05),
    Mixture(3, 2.0),
    Mixture(4, 5.0, normalized=True),
    Mixture(2, 1e3),
]


# --- the E-step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_the_pull_is_minus_the_gradient_of_the_log_density(mixture: Mixture) -> None:
    task = small_task()
    centre = centres(mixture, task)
    weights = [
        nn.Parameter(sum((centre[f"{k}/{n}"] for k in range(mixture.members)), torch.zeros(())) / mixture.members + 0.1)
        for n in task.trainable
    ]
    phi = dict(zip(task.trainable, weights, strict=True))
    density = log_density(mixture, centre, phi, task.trainable, precision_of(mixture, task))
    expected = torch.autograd.grad(-density, weights)
    pull = mixture.pull(centre, task)
    assert pull is not None
    assert pull.gradient is not None
    gradients = [torch.full_like(w, 0.25) for w in weights]
    with torch.no_grad():
        pull.gradient(list(weights), gradients)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient - 0.25, wanted, rtol=1e-9, atol=1e-12)


def test_without_precision_there_is_no_pull() -> None:
    assert Mixture(3, 0.0).pull({}, small_task()) is None


def test_a_client_starts_from_a_random_centre_and_says_which() -> None:
    mixture, task = Mixture(3), small_task()
    centre = centres(mixture, task)
    seen = set()
    for i in range(20):
        start = mixture.start(centre, task, FEDERATION.client(0), KEY.fold_in(i))
        member = int(start.note["#member"])
        seen.add(member)
        assert tree_sha256(start.weights) == tree_sha256(subtree(str(member), centre))
        assert mixture.start(centre, task, FEDERATION.client(0), KEY.fold_in(i)).note == start.note
    assert seen == {0, 1, 2}


def test_a_client_may_start_from_the_centre_that_fits_best() -> None:
    task = Task(lambda: nn.Linear(1, 1, bias=False), loss=nn.functional.mse_loss, metrics={}, outputs="values")
    x = torch.arange(1.0, 5.0)[:, None]
    data = ClientData(Part.whole(x, 2.0 * x), Part.whole(x, x))
    centre = {f"{k}/weight": torch.tensor([[w]]) for k, w in enumerate((-2.0, 2.5, 1.0))}
    best = Mixture(3, start_from="best").start(centre, task, data, KEY)
    assert best.note["#member"].tolist() == [1]
    assert best.weights["weight"].tolist() == [[2.5]]
    nothing = ClientData(Part(x, x, torch.zeros(0, dtype=torch.int64)), data.test)
    assert int(Mixture(3, start_from="best").start(centre, task, nothing, KEY).note["#member"]) in range(3)


def test_centres_start_apart() -> None:
    mixture, task = Mixture(3), small_task()
    centre = mixture.init(task, KEY)
    assert len({tree_sha256(subtree(str(k), centre)) for k in range(3)}) == 3
    assert tree_sha256(subtree("0", centre)) == tree_sha256(task.init(KEY))  # the first is FedAvg's
    assert list(mixture.spec(task)) == list(centre)


def test_the_message_is_the_difference_from_the_centre_that_it_started_from() -> None:
    task = small_task()
    method = fedensemble(members=3, solver=Solver(lr=0.1, local_epochs=1)).bind(task)
    centre = method.broadcast(method.init(KEY), ClientInfo(2, 1, 0), KEY)
    update = method.client_update(centre, {}, FEDERATION.client(2), ClientInfo(2, 1, 0), KEY)
    member = int(update.message["#member"])
    assert update.fitted is not None
    for name, parameter in update.fitted.named_parameters():
        assert torch.equal(parameter.detach() - centre[f"{member}/{name}"], update.message[name])


# --- the M-step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("spread", [0.01, 0.5])
def test_the_gradient_m_step_is_the_gradient_of_the_log_density(mixture: Mixture, spread: float) -> None:
    task = small_task()
    centre = centres(mixture, task)
    votes = some_votes(mixture, centre, task, clients=5, spread=spread)
    total = sum(vote.weight for vote in votes)
    free = {name: leaf.clone().requires_grad_() for name, leaf in centre.items()}
    objective = torch.zeros((), dtype=torch.float64)
    precision = precision_of(mixture, task)
    for vote in votes:
        member = int(vote.message["#member"])
        phi = {n: centre[f"{member}/{n}"] + vote.message[n] for n in task.trainable}
        objective = objective + vote.weight * log_density(mixture, free, phi, task.trainable, precision)
    expected = torch.autograd.grad(objective, list(free.values()))
    ascent = mixture.ascent(centre, votes, task)
    for name, wanted in zip(free, expected, strict=True):
        torch.testing.assert_close(precision * total * ascent[name], wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0])
def test_the_closed_m_step_never_decreases_the_objective(mixture: Mixture, spread: float) -> None:
    task = small_task()
    centre = centres(mixture, task)
    fitted = [
        (vote.weight, {n: centre[f"{int(vote.message['#member'])}/{n}"] + vote.message[n] for n in task.trainable})
        for vote in some_votes(mixture, centre, task, clients=7, spread=spread)
    ]
    precision = precision_of(mixture, task)

    def objective(at: Tree) -> float:
        return sum(w * float(log_density(mixture, at, phi, task.trainable, precision)) for w, phi in fitted)

    start = objective(centre)
    last = start
    for _ in range(4):
        zero = torch.tensor([0], dtype=torch.uint8)
        votes = [Vote(w, {**{n: phi[n] - centre[f"0/{n}"] for n in phi}, "#member": zero}) for w, phi in fitted]
        shift = mixture.shift(centre, votes, task)
        centre = {name: leaf + shift[name] for name, leaf in centre.items()}
        now = objective(centre)
        assert now >= last - 1e-9 * abs(last)
        last = now
    assert last > start


def test_the_closed_m_step_is_the_mean_by_responsibility() -> None:
    mixture, task = Mixture(2, 0.2), small_task()
    centre = centres(mixture, task, spread=0.5)
    votes = some_votes(mixture, centre, task, clients=4, spread=0.4)
    phis = [{n: centre[f"{int(v.message['#member'])}/{n}"] + v.message[n] for n in task.trainable} for v in votes]
    shift = mixture.shift(centre, votes, task)
    shares = []
    for phi in phis:
        distances = [sum((phi[n] - centre[f"{k}/{n}"]).square().sum() for n in phi) for k in range(2)]
        shares.append([v.item() for v in torch.softmax(-0.1 * torch.stack([torch.as_tensor(d) for d in distances]), 0)])
    assert 0.01 < shares[0][0] < 0.99  # soft, or the test would say little
    for k in range(2):
        mass = sum(v.weight * r[k] for v, r in zip(votes, shares, strict=True))
        for n in task.trainable:
            mean = sum(v.weight * r[k] * phi[n] for v, r, phi in zip(votes, shares, phis, strict=True)) / mass
            torch.testing.assert_close(centre[f"{k}/{n}"] + shift[f"{k}/{n}"], mean, rtol=1e-6, atol=1e-9)


def test_a_centre_that_nobody_answers_for_stays() -> None:
    mixture, task = Mixture(3, 1e6), small_task()
    centre = centres(mixture, task)
    votes = [vote for vote in some_votes(mixture, centre, task, clients=6, spread=1e-3) if vote.message["#member"] != 1]
    shift = mixture.shift(centre, votes, task)
    assert all(not leaf.any() for leaf in subtree("1", shift).values())
    assert all(leaf.any() for leaf in subtree("0", shift).values())


def test_running_statistics_do_not_decide_who_answers() -> None:
    mixture, task = Mixture(2, 1.0), small_task(batch_norm=True)
    centre = centres(mixture, task, spread=0.1)
    (vote,) = some_votes(mixture, centre, task, clients=1, spread=0.1)
    _, mass = mixture._pull_of(centre, [vote], task)
    far = {**vote.message, "1.running_var": vote.message["1.running_var"] + 1e3}
    shift = mixture.shift(centre, [vote._replace(message=far)], task)
    assert mixture._pull_of(centre, [vote._replace(message=far)], task)[1] == mass
    assert float(shift["0/1.running_var"].min()) > 900  # and they are averaged all the same


def test_responsibilities() -> None:
    distances = [torch.tensor(d, dtype=torch.float64) for d in (0.3, 4.0, 2.0)]
    raw = [math.exp(-0.5 * 0.7 * d) for d in (0.3, 4.0, 2.0)]
    expected = torch.tensor([r / sum(raw) for r in raw], dtype=torch.float64)
    torch.testing.assert_close(responsibilities(distances, 0.7), expected, rtol=1e-12, atol=0.0)
    huge = responsibilities([torch.tensor(1e12), torch.tensor(1e12 + 1e9)], 1.0)
    assert huge.tolist() == [1.0, 0.0]  # exp(−5e11) alone would be 0/0
    assert responsibilities(distances, 0.0).tolist() == [1 / 3] * 3


# --- prediction ------------------------------------------------------------------------------------------------------


def member(seed: int) -> nn.Module:
    task = small_task()
    module = task.fresh()
    with torch.no_grad():
        for name, leaf in task.init(Key.from_seed(seed)).items():
            module.get_parameter(name).copy_(3 * leaf)
    return module.eval()


def test_an_ensemble_averages_probabilities() -> None:
    members, x = [member(s) for s in range(3)], FEDERATION.test.tensors()[0]
    predicted = Ensemble(members).eval()(x)
    mean = torch.stack([m(x).softmax(dim=1) for m in members]).mean(dim=0)
    torch.testing.assert_close(predicted.exp(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(predicted.exp().sum(dim=1), torch.ones(len(x)), rtol=1e-5, atol=0.0)
    # Which is not the mean of the outputs:
    assert not torch.allclose(torch.stack([m(x) for m in members]).mean(dim=0).softmax(dim=1), mean, atol=1e-3)


def test_identical_members_predict_as_one() -> None:
    one, x = member(0), FEDERATION.test.tensors()[0]
    together = Ensemble([member(0) for _ in range(4)]).eval()(x)
    torch.testing.assert_close(together, one(x).log_softmax(dim=1), rtol=1e-5, atol=1e-6)
    assert torch.equal(together.argmax(dim=1), one(x).argmax(dim=1))
    torch.testing.assert_close(
        nn.functional.cross_entropy(together, together.argmax(dim=1)),
        nn.functional.cross_entropy(one(x), together.argmax(dim=1)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_values_are_averaged_as_they_are() -> None:
    members, x = [member(s) for s in range(2)], FEDERATION.test.tensors()[0]
    predicted = Ensemble(members, probabilities=False).eval()(x)
    torch.testing.assert_close(predicted, (members[0](x) + members[1](x)) / 2, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("outputs", ["logits", "values"])
def test_the_servers_model_is_the_ensemble_of_its_centres(outputs: str) -> None:
    task = Task(small_task().build, outputs=outputs)  # type: ignore[arg-type]
    method = fedensemble(members=2).bind(task)
    weights = [task.init(Key.from_seed(s)) for s in range(2)]
    server = prefixed("w", {**prefixed("0", weights[0]), **prefixed("1", weights[1])})
    model = method.global_model(server)
    assert isinstance(model, Ensemble)
    assert model.probabilities == (outputs == "logits")
    assert not model.training
    for inner, own in zip(model.members, weights, strict=True):
        assert tree_sha256({n: p.detach() for n, p in inner.named_parameters()}) == tree_sha256(own)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"members": 0}, "members must lie between 1 and 255, got 0."),
        ({"members": 256}, "members must lie between 1 and 255, got 256."),
        ({"precision": -1.0}, "the precision of a mixture must be finite and ≥ 0, got -1.0."),
        ({"precision": math.nan}, "the precision of a mixture must be finite and ≥ 0, got nan."),
        ({"start_from": "worst"}, "unknown start_from 'worst'; known: best, random."),
    ],
)
def test_refusals(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fedensemble(**settings)  # type: ignore[arg-type]
    assert str(caught.value) == said
