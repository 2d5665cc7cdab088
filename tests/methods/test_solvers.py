from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core import ClientInfo, ConfigError, Key, Part, Task, Tree, isolated, read_state, tree_sha256, write_state
from laconic.methods import Gaussian, Laplace, Latent, Pull, Solver, adam, fedavg, sgd, solve
from laconic.methods.catalogue import methods
from laconic.testing import small_federation, small_task

KEY = Key.from_seed(0)
CLIENT = small_federation().client(5)  # 17 examples


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def start(task: Task) -> Tree:
    return task.init(KEY.fold_in("init"))


def fitted(
    solver: Solver,
    *,
    task: Task | None = None,
    part: Part = CLIENT.train,
    round: int = 1,
    pull: Pull | None = None,
    key: Key = KEY,
) -> Tree:
    """Where a fit ends."""
    task = task or Task(net)
    task.load(start(task))
    with isolated(KEY):
        solve(task, part, solver, round=round, key=key, pull=pull)
    return {name: leaf.clone() for name, leaf in read_state(task.module).items()}


def batches(solver: Solver, part: Part = CLIENT.train) -> Iterator[tuple[Tensor, Tensor]]:
    """The written order of the examples: a new permutation for every epoch."""
    for epoch in range(solver.local_epochs):
        order = torch.from_numpy(KEY.fold_in("epoch", epoch).numpy().permutation(len(part)))
        for rows in order.split(solver.batch_size):
            yield part.x[part.index[rows]], part.y[part.index[rows]]


def by_hand(
    make: Callable[[Any], torch.optim.Optimizer],
    solver: Solver,
    *,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    build: Callable[[], nn.Module] = net,
) -> Tree:
    """The loop that anyone would write with torch.optim."""
    task = Task(build)
    module = task.load(start(task)).train()
    optimizer = make(module.parameters())
    for x, y in batches(solver):
        loss = F.cross_entropy(module(x), y)
        if penalty is not None:
            loss = loss + penalty(module)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: leaf.clone() for name, leaf in read_state(module).items()}


def assert_same_bits(one: Tree, other: Tree) -> None:
    assert tree_sha256(one) == tree_sha256(other)


# --- steps are torch's -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_sgd_is_torchs_bit_for_bit(momentum: float, weight_decay: float) -> None:
    solver = Solver(lr=0.1, momentum=momentum, weight_decay=weight_decay, local_epochs=3, batch_size=5)
    expected = by_hand(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum, weight_decay=weight_decay, foreach=True), solver
    )
    assert_same_bits(fitted(solver), expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_adam_is_torchs_bit_for_bit(weight_decay: float) -> None:
    solver = Solver(optimizer="adam", lr=0.01, weight_decay=weight_decay, local_epochs=3, batch_size=5)
    expected = by_hand(lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=weight_decay), solver)
    assert_same_bits(fitted(solver), expected)


def test_a_pull_acts_like_a_penalty_in_the_loss() -> None:
    solver = Solver(lr=0.1, momentum=0.5, local_epochs=2, batch_size=5)
    task = Task(net)
    anchor = {name: leaf + 0.5 for name, leaf in start(task).items()}

    def penalty(module: nn.Module) -> Tensor:
        squares = [(p - anchor[n]).square().sum() for n, p in module.named_parameters()]
        return 0.15 * torch.stack(squares).sum()

    expected = by_hand(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), solver, penalty=penalty)
    for name, leaf in fitted(solver, pull=Gaussian(0.3).pull(anchor, task)).items():
        torch.testing.assert_close(leaf, expected[name], rtol=1e-5, atol=1e-6)


class Sums(nn.Module):
    """Gradients of which autograd gives views: the same tensor twice, and one of stride 0."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(3, 4))
        self.two = nn.Parameter(torch.randn(3, 4))
        self.level = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.one + self.two) * self.level.sum()


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}]
)
def test_gradients_that_share_memory_are_not_mixed_up(options: dict[str, float]) -> None:
    solver = Solver(lr=0.05, local_epochs=2, batch_size=5, **options)  # type: ignore[arg-type]
    expected = by_hand(lambda p: torch.optim.SGD(p, lr=0.05, foreach=True, **options), solver, build=Sums)
    for name, leaf in fitted(solver, task=Task(Sums)).items():
        # A stride of 0 takes another path through torch's kernels: the last bit may differ.
        torch.testing.assert_close(leaf, expected[name], rtol=1e-6, atol=1e-6)


def test_a_pull_does_not_mix_them_up_either() -> None:
    task = Task(Sums)
    centre = start(task)
    solver = Solver(lr=0.05, local_epochs=2, batch_size=5)
    far = {name: leaf + (1.0 if name == "one" else 0.0) for name, leaf in centre.items()}
    at = fitted(solver, task=task, pull=Gaussian(0.5).pull(far, task))
    expected = by_hand(
        lambda p: torch.optim.SGD(p, lr=0.05),
        solver,
        penalty=lambda m: 0.25 * torch.stack([(p - far[n]).square().sum() for n, p in m.named_parameters()]).sum(),
        build=Sums,
    )
    for name, leaf in at.items():
        torch.testing.assert_close(leaf, expected[name], rtol=1e-5, atol=1e-6)


def test_projections_come_after_the_step_with_its_learning_rate() -> None:
    seen: list[float] = []

    def project(weights: list[Tensor], lr: float) -> None:
        seen.append(lr)
        for weight in weights:
            weight.data.fill_(7.0)

    at = fitted(Solver(lr=0.5, lr_decay=0.5, local_epochs=2, batch_size=9), round=3, pull=Pull(project=project))
    assert seen == [0.125] * 4
    assert all(bool((leaf == 7.0).all()) for leaf in at.values())


# --- how long --------------------------------------------------------------------------------------------------------


def steps(solver: Solver, part: Part = CLIENT.train, build: Callable[[], nn.Module] = net) -> int:
    task = Task(build)
    task.load(start(task))
    return solve(task, part, solver, round=1, key=KEY).steps


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"local_epochs": 1, "batch_size": 5}, 4),
        ({"local_epochs": 3, "batch_size": 5}, 12),
        ({"local_epochs": 2, "batch_size": 17}, 2),
        ({"local_epochs": 2, "batch_size": 99}, 2),
        ({"local_steps": 1, "batch_size": 5}, 1),
        ({"local_steps": 4, "batch_size": 5}, 4),
        ({"local_steps": 11, "batch_size": 5}, 11),
        ({"local_steps": 3, "local_epochs": 50, "batch_size": 5}, 3),
    ],
)
def test_epochs_and_steps(settings: dict[str, int], expected: int) -> None:
    assert steps(Solver(lr=0.1, **settings)) == expected  # type: ignore[arg-type]


def test_steps_go_through_the_same_batches_as_epochs() -> None:
    by_epochs = fitted(Solver(lr=0.1, local_epochs=2, batch_size=5))
    assert_same_bits(fitted(Solver(lr=0.1, local_steps=8, batch_size=5)), by_epochs)
    assert tree_sha256(fitted(Solver(lr=0.1, local_steps=7, batch_size=5))) != tree_sha256(by_epochs)


def test_every_epoch_sees_every_example_once_in_another_order() -> None:
    seen: list[list[int]] = [[]]

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            seen[-1] += x.int().tolist()
            return x * self.weight

    task = Task(Watch, loss=F.mse_loss, metrics={}, outputs="values")
    rows = torch.arange(10.0)
    solve(
        task,
        Part(rows, rows, torch.tensor([3, 1, 4, 5, 9, 2, 6])),
        Solver(local_epochs=3, batch_size=3),
        round=1,
        key=KEY,
    )
    epochs = [seen[0][i : i + 7] for i in (0, 7, 14)]
    assert [sorted(epoch) for epoch in epochs] == [[1, 2, 3, 4, 5, 6, 9]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_is_a_function_of_the_key() -> None:
    solver = Solver(lr=0.1, local_epochs=1, batch_size=5)
    assert_same_bits(fitted(solver), fitted(solver))
    assert tree_sha256(fitted(solver)) != tree_sha256(fitted(solver, key=KEY.fold_in("other")))


def test_a_client_without_examples_stays_where_it_is() -> None:
    nobody = Part(CLIENT.train.x, CLIENT.train.y, torch.zeros(0, dtype=torch.int64))
    for solver in (Solver(local_epochs=2), Solver(local_steps=2)):
        task = Task(net)
        assert_same_bits(fitted(solver, part=nobody, task=task), start(task))
        assert solve(task, nobody, solver, round=1, key=KEY) == (0.0, 0)


def test_the_loss_is_the_mean_over_steps() -> None:
    task = Task(net)
    task.load(start(task))
    solver = Solver(lr=1e-30, local_epochs=1, batch_size=5)  # so small that nothing moves
    losses = []
    with torch.no_grad():
        for x, y in batches(solver):
            losses.append(F.cross_entropy(task.module(x), y))
    result = solve(task, CLIENT.train, solver, round=1, key=KEY)
    assert result.loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)


# --- learning-rate decay ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("round", "rate"), [(1, 0.4), (2, 0.2), (4, 0.05)])
def test_the_learning_rate_decays_over_rounds(round: int, rate: float) -> None:
    decaying = Solver(lr=0.4, lr_decay=0.5, momentum=0.5, local_epochs=1, batch_size=5)
    assert decaying.rate(round=round) == rate
    assert_same_bits(fitted(decaying, round=round), fitted(Solver(**{**vars(decaying), "lr": rate, "lr_decay": 1.0})))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_optimizer_starts_afresh_in_every_round(optimizer: str) -> None:
    momentum = 0.9 if optimizer == "sgd" else 0.0
    solver = Solver(optimizer=optimizer, lr=0.1, momentum=momentum, local_epochs=1)  # type: ignore[arg-type]
    task = Task(net)
    assert_same_bits(fitted(solver, task=task), fitted(solver, task=task))


# --- models with peculiarities ---------------------------------------------------------------------------------------


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def first(count: int) -> Part:
    return Part(CLIENT.train.x, CLIENT.train.y, CLIENT.train.index[:count])


def test_batch_normalisation_passes_over_a_last_batch_of_one() -> None:
    assert steps(Solver(local_epochs=2, batch_size=4), build=normalized) == 8  # 17 = 4 · 4 + 1
    assert steps(Solver(local_epochs=2, batch_size=4)) == 10
    assert steps(Solver(local_epochs=2, batch_size=5), build=normalized) == 8  # 17 = 3 · 5 + 2


def test_batches_that_are_passed_over_do_not_count_as_steps() -> None:
    assert steps(Solver(local_steps=9, batch_size=4), build=normalized) == 9


@pytest.mark.parametrize("settings", [{"local_epochs": 3}, {"local_steps": 3}])
def test_batch_normalisation_with_one_example_learns_nothing_and_ends(settings: dict[str, int]) -> None:
    assert steps(Solver(**settings), first(1), normalized) == 0  # type: ignore[arg-type]
    assert steps(Solver(**settings, batch_size=1), build=normalized) == 0  # type: ignore[arg-type]
    assert steps(Solver(**settings), first(1)) == 3  # type: ignore[arg-type]


def test_running_statistics_move_and_are_sent() -> None:
    task = Task(normalized)
    method = fedavg(solver=Solver(lr=0.1, local_epochs=2, batch_size=5)).bind(task)
    update = method.client_update(start(task), {}, CLIENT, ClientInfo(5, 1, 0), KEY)
    assert task.trainable == ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    assert list(update.message) == [*task.trainable, "1.running_mean", "1.running_var"]
    assert bool(update.message["1.running_mean"].any())
    assert bool(update.message["1.running_var"].any())
    assert "1.num_batches_tracked" not in update.message


def test_the_proximal_step_leaves_running_statistics_alone() -> None:
    task = Task(normalized)
    centre = start(task)
    at = fitted(Solver(lr=0.1, local_epochs=1, batch_size=5), task=task, pull=Laplace(1e3).pull(centre, task))
    for name, leaf in at.items():
        assert torch.equal(leaf, centre[name]) == (name in task.trainable)


class Unused(nn.Module):
    """A parameter that the loss never sees, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.spare = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) * self.scale
        return out


@pytest.mark.parametrize(
    "solver", [sgd(lr=0.1, momentum=0.9), adam(lr=0.1), Solver(lr=0.1, local_epochs=1, weight_decay=0.0)], ids=str
)
def test_a_parameter_that_is_not_used_stays(solver: Solver) -> None:
    task = Task(Unused)
    centre, at = start(task), fitted(solver, task=task)
    for name in task.spec:
        assert torch.equal(at[name], centre[name]) == (not name.startswith("body")), name


def test_a_parameter_that_is_not_used_decays() -> None:
    task = Task(Unused)
    at = fitted(Solver(lr=0.5, weight_decay=0.5, local_steps=1), task=task)
    torch.testing.assert_close(at["spare.weight"], 0.75 * start(task)["spare.weight"], rtol=1e-6, atol=1e-7)
    assert torch.equal(at["scale"], torch.ones(3))


def test_dropout_is_a_function_of_the_key_that_isolates() -> None:
    solver = Solver(lr=0.1, local_epochs=2, batch_size=5)
    assert_same_bits(fitted(solver, task=small_task()), fitted(solver, task=small_task()))


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0."),
        ({"lr": -1.0}, "lr must be positive and finite, got -1.0."),
        ({"lr": math.nan}, "lr must be positive and finite, got nan."),
        ({"lr": math.inf}, "lr must be positive and finite, got inf."),
        ({"momentum": 1.0}, "momentum must lie in [0, 1), got 1.0."),
        ({"momentum": -0.1}, "momentum must lie in [0, 1), got -0.1."),
        ({"weight_decay": -1e-9}, "weight_decay must be finite and not negative, got -1e-09."),
        ({"weight_decay": math.inf}, "weight_decay must be finite and not negative, got inf."),
        ({"local_epochs": 0}, "local_epochs must be at least 1, got 0."),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0."),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0."),
        ({"lr_decay": 0.0}, "lr_decay must lie in (0, 1], got 0.0."),
        ({"lr_decay": 1.1}, "lr_decay must lie in (0, 1], got 1.1."),
        ({"optimizer": "adam", "momentum": 0.5}, "momentum goes with optimizer = 'sgd'; adam has its own, leave"),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as made:
        Solver(**settings)
    assert str(made.value).startswith(said)
    with pytest.raises(ConfigError) as configured:
        methods.build("fedavg", settings)
    assert str(configured.value) == str(made.value)


def test_an_unknown_optimizer_is_refused_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer must be one of sgd, adam, got 'rmsprop'\.$"):
        Solver(optimizer="rmsprop")  # type: ignore[arg-type]


def test_shorthands() -> None:
    assert sgd(lr=0.3, momentum=0.5, epochs=2, batch_size=7) == Solver(
        lr=0.3, momentum=0.5, local_epochs=2, batch_size=7
    )
    assert adam(lr=0.3, epochs=2, batch_size=7) == Solver(optimizer="adam", lr=0.3, local_epochs=2, batch_size=7)


def test_clip_norm_shortens_long_gradients_only() -> None:
    """SGD with a clipped gradient, by hand; and a limit that is never reached changes nothing."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    part = Part.whole(x, y)

    def fitted(clip: float | None) -> list[torch.Tensor]:
        task = Task(lambda: torch.nn.Linear(4, 3))
        write_state(task.module, task.init(Key.from_seed(0)))
        solver = Solver(lr=1.0, local_steps=1, batch_size=12, clip_norm=clip)
        solve(task, part, solver, round=1, key=Key.from_seed(0))
        return [p.detach().clone() for p in task.module.parameters()]

    start = list(Task(lambda: torch.nn.Linear(4, 3)).init(Key.from_seed(0)).values())
    plain, clipped = fitted(None), fitted(0.05)
    moved = torch.cat([(a - b).flatten() for a, b in zip(plain, start, strict=True)])
    shorter = torch.cat([(a - b).flatten() for a, b in zip(clipped, start, strict=True)])
    assert float(moved.norm()) > 0.05
    torch.testing.assert_close(shorter, moved * (0.05 / moved.norm()), rtol=1e-4, atol=1e-6)
    for a, b in zip(fitted(1e6), plain, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ConfigError, match="clip_norm"):
        Solver(clip_norm=0.0)


# --- something else in the place of the weights, and a memory ------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_what_stands_in_for_all_weights_is_trained_in_their_place(optimizer: Any) -> None:
    """Logarithms of positive weights: what the solver moves is what autograd would have it move."""
    task = Task(net)
    first = {name: leaf.abs() + 0.1 for name, leaf in start(task).items()}
    logs = [leaf.log() for leaf in first.values()]
    solver = Solver(optimizer=optimizer, lr=0.05, local_steps=3, batch_size=17, clip_norm=0.5)

    def draw(trained: list[Tensor]) -> tuple[Tree, list[Tensor]]:
        weights = [leaf.exp().requires_grad_() for leaf in trained]
        return dict(zip(first, weights, strict=True)), weights

    def learn(trained: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        return [gradient * leaf.exp() for gradient, leaf in zip(gradients, trained, strict=True)]

    task.load(first)
    solve(task, CLIENT.train, solver, round=1, key=KEY, latent=Latent(draw, learn, trained=logs))
    assert tree_sha256(read_state(task.module)) == tree_sha256(first)  # nobody trained those

    own = [leaf.log().requires_grad_() for leaf in first.values()]
    make = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    steps: Any = make(own, lr=0.05)
    x, y = CLIENT.train.tensors()
    for _ in range(3):
        steps.zero_grad()
        weights = dict(zip(first, [leaf.exp() for leaf in own], strict=True))
        F.cross_entropy(torch.func.functional_call(task.module, weights, (x,)), y).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(own, 0.5)
        steps.step()
    for ours, theirs in zip(logs, own, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    "solver",
    [
        Solver(optimizer="adam", lr=0.05, batch_size=17),
        Solver(lr=0.1, momentum=0.9, batch_size=17),
        Solver(lr=0.1, batch_size=17),
    ],
    ids=["adam", "momentum", "sgd"],
)
def test_with_a_memory_two_fits_are_one(solver: Solver) -> None:
    """The whole part is one batch, so that only the optimizer's state tells one fit of six steps from two of three."""
    whole = fitted(replace(solver, local_steps=6))
    task, memory = Task(net), Tree()
    task.load(start(task))
    ends = []
    for _ in range(2):
        before = tree_sha256(memory)
        kept = dict(memory)
        solve(task, CLIENT.train, replace(solver, local_steps=3), round=1, key=KEY, memory=memory)
        assert tree_sha256(kept) == before  # tensors are replaced, not written to
        ends.append(len(memory))
    twice = read_state(task.module)
    assert all(torch.allclose(twice[name], leaf, atol=1e-5) for name, leaf in whole.items())
    remembers = solver.optimizer == "adam" or solver.momentum > 0
    assert (ends[0] > 0) == remembers
    task.load(start(task))
    for _ in range(2):
        solve(task, CLIENT.train, replace(solver, local_steps=3), round=1, key=KEY)
    forgetful = read_state(task.module)
    same = all(torch.allclose(forgetful[name], leaf, atol=1e-5) for name, leaf in whole.items())
    assert same != remembers
