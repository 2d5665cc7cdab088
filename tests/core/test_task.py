from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core import UNBOUND, ConfigError, Key, Leaf, Task, accuracy, read_state, tree_sha256, write_state

KEY = Key.from_seed(3)


class Net(nn.Module):
    """Everything that a state may hold, and what it may not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2, bias=False)
        self.head.weight.requires_grad_(False)
        self.register_buffer("scale", torch.rand(2))
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.body(x))) * self.scale
        return out


STATE = [
    "body.weight",
    "body.bias",
    "norm.weight",
    "norm.bias",
    "head.weight",
    "scale",
    "norm.running_mean",
    "norm.running_var",
]


# --- state -----------------------------------------------------------------------------------------------------------


def test_the_state_is_parameters_then_floating_point_buffers_that_are_saved() -> None:
    task = Task(Net)
    assert list(task.spec) == STATE == list(task.init(KEY)) == list(read_state(Net()))
    assert task.spec["norm.running_mean"] == Leaf((3,))
    assert task.trainable == ("body.weight", "body.bias", "norm.weight", "norm.bias")


def test_reading_gives_the_modules_own_tensors_and_writing_copies() -> None:
    one, other = Net(), Net()
    own = read_state(one)
    assert own["body.weight"].data_ptr() == one.body.weight.data_ptr()
    assert not own["body.weight"].requires_grad
    state = {name: torch.full_like(leaf, float(i)) for i, (name, leaf) in enumerate(own.items())}
    write_state(other, {**state, "unrelated": torch.zeros(1)})
    assert tree_sha256(read_state(other)) == tree_sha256(state)
    state["body.weight"].zero_()
    assert float(other.body.weight.detach().sum()) == 0.0  # it was the 0th
    state["scale"].zero_()
    assert other.get_buffer("scale").tolist() == [5.0, 5.0]


def test_writing_keeps_parameters_trainable() -> None:
    net = Net()
    write_state(net, read_state(Net()))
    assert net.body.weight.requires_grad
    assert net.body.weight.grad_fn is None


def test_writing_wants_every_leaf() -> None:
    state = read_state(Net())
    del state["norm.running_var"]
    with pytest.raises(KeyError, match=r"norm\.running_var"):
        write_state(Net(), state)


def test_tied_weights_are_one_leaf() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2, bias=False)
            self.two = nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight

    task = Task(Tied)
    assert list(task.spec) == ["one.weight"]
    module = task.load({"one.weight": torch.eye(2)})
    assert module.get_parameter("two.weight").tolist() == [[1.0, 0.0], [0.0, 1.0]]


# --- the first weights -----------------------------------------------------------------------------------------------


def test_what_the_constructor_draws_is_a_function_of_the_key() -> None:
    before = torch.random.get_rng_state()
    first = tree_sha256(Task(Net).init(KEY))
    torch.rand(7)
    assert tree_sha256(Task(Net).init(KEY)) == first
    assert tree_sha256(Task(Net).init(Key.from_seed(4))) != first
    torch.random.set_rng_state(before)
    Task(Net).init(KEY)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_initialize_has_the_last_word_and_gets_the_key() -> None:
    given: list[Key] = []

    def initialize(module: nn.Module, key: Key) -> None:
        given.append(key)
        with torch.no_grad():
            module.get_parameter("body.bias").fill_(7.0)

    state = Task(Net, initialize=initialize).init(KEY)
    assert given == [KEY]
    assert state["body.bias"].tolist() == [7.0, 7.0, 7.0]


def test_initial_weights_do_not_share_memory_with_the_working_copy() -> None:
    task = Task(Net)
    state = task.init(KEY)
    hashed = tree_sha256(state)
    with torch.no_grad():
        for leaf in read_state(task.module).values():
            leaf.fill_(9.0)
    assert tree_sha256(state) == hashed
    assert tree_sha256(task.init(KEY)) == hashed


def given_weights() -> dict[str, Tensor]:
    net = Net()
    return {name: torch.randn(leaf.shape, dtype=torch.float64) for name, leaf in read_state(net).items()}


def test_training_may_start_from_given_weights() -> None:
    given = given_weights()
    # A state dict holds more than the state (counters, masks) and in another order.
    extra = {"norm.num_batches_tracked": torch.tensor(5), "mask": torch.tensor([False, False])}
    state = Task(Net, initial={**extra, **dict(reversed(given.items()))}).init(KEY)
    assert list(state) == STATE
    for name, leaf in state.items():
        assert leaf.dtype == torch.float32
        assert torch.equal(leaf, given[name].float())
    state["scale"].zero_()
    assert not torch.equal(given["scale"], torch.zeros(2))


def test_given_weights_that_need_gradients_lose_them() -> None:
    given = dict(Net().named_parameters()) | dict(Net().named_buffers())
    assert not any(leaf.requires_grad for leaf in Task(Net, initial=given).init(KEY).values())


def test_a_missing_leaf_is_named() -> None:
    given = given_weights()
    del given["norm.bias"]
    with pytest.raises(ConfigError) as caught:
        Task(Net, initial=given).init(KEY)
    assert str(caught.value) == "model.init has no weights for 'norm.bias'; were they saved from another model?"
    del given["norm.weight"], given["scale"]
    with pytest.raises(ConfigError, match=r"no weights for 'norm.weight' and 2 more leaves"):
        Task(Net, initial=given).init(KEY)


def test_a_wrong_shape_is_named() -> None:
    given = given_weights()
    given["body.weight"] = given["body.weight"].T
    with pytest.raises(ConfigError) as caught:
        Task(Net, initial=given).init(KEY)
    assert str(caught.value) == "model.init gives 'body.weight' the shape (2, 3), but this model has (3, 2)."


# --- the working copy ------------------------------------------------------------------------------------------------


def test_the_working_copy_is_one_and_fresh_ones_are_many() -> None:
    task = Task(Net)
    assert task.module is task.module
    assert task.fresh() is not task.module
    assert tree_sha256(read_state(task.fresh())) == tree_sha256(read_state(task.fresh()))


class Counting(nn.Module):
    """Buffers that training changes and that are no state, one in place and one replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2, momentum=None)
        self.register_buffer("turns", torch.tensor([3]))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.turns = self.turns + 1
        self.get_buffer("hidden").mul_(2)
        out: Tensor = self.norm(self.linear(x)) * self.hidden + self.turns
        return out


def test_load_forgets_what_is_no_state() -> None:
    task = Task(Counting)
    state = task.init(KEY)
    x = torch.arange(6.0).reshape(3, 2)
    first = task.load(state).train()(x)
    assert int(task.module.get_buffer("turns")) == 4
    assert int(task.module.get_buffer("norm.num_batches_tracked")) == 1
    for _ in range(2):
        assert torch.equal(task.load(state).train()(x), first)
        assert tree_sha256(read_state(task.module)) != tree_sha256(state)  # running statistics went on
    task.load(state)
    assert int(task.module.get_buffer("turns")) == 3
    assert float(task.module.get_buffer("hidden")) == 1.0
    assert int(task.module.get_buffer("norm.num_batches_tracked")) == 0


def test_accuracy_is_per_example() -> None:
    output = torch.tensor([[0.0, 2.0], [3.0, 1.0], [0.0, 1.0]])
    assert accuracy(output, torch.tensor([1, 1, 1])).tolist() == [1.0, 0.0, 1.0]


def test_defaults_are_those_of_classification() -> None:
    task: Any = Task(Net)
    assert task.loss is F.cross_entropy
    assert dict(task.metrics) == {"accuracy": accuracy}
    assert (task.device, task.outputs) == ("cpu", "logits")


# --- what stays on a device ------------------------------------------------------------------------------------------


class Beside:
    """Something that a device learns for itself."""

    parameters: list[Tensor] = []  # noqa: RUF012

    def before_step(self, x: Tensor, protected: Tensor | None) -> None: ...

    def loss(self, forward: Any, x: Tensor, y: Tensor, protected: Tensor | None) -> Tensor:
        return F.cross_entropy(forward(x), y)


def test_private_leaves_are_no_part_of_the_state() -> None:
    task = Task(Net)
    kept = task.keeping(["body.weight", "norm.running_mean"])
    assert list(kept.spec) == [name for name in STATE if name not in ("body.weight", "norm.running_mean")]
    assert kept.trainable == ("body.bias", "norm.weight", "norm.bias")
    assert "body.weight" not in kept.moving
    assert kept.init(KEY).keys() == kept.spec.keys()
    assert all(torch.equal(leaf, task.init(KEY)[name]) for name, leaf in kept.init(KEY).items())
    assert list(task.spec) == STATE  # the task itself has none
    assert task.private == {}
    assert kept.module is task.module


def test_a_device_computes_with_its_own_leaves_and_the_next_one_with_its_own() -> None:
    kept = Task(lambda: nn.Linear(2, 3)).keeping(["bias"])
    shared = kept.init(KEY)
    for number in (1.0, 2.0):
        with kept.held({"bias": torch.full((3,), number)}):
            assert kept.complete(shared)["bias"].tolist() == [number] * 3
            assert kept.load(shared).bias.tolist() == [number] * 3  # type: ignore[union-attr]
    assert kept.load(shared).bias.tolist() == [0.0] * 3  # type: ignore[union-attr]
    assert "bias" not in shared


def test_what_a_fit_leaves_in_private_is_read_while_the_device_has_its_turn() -> None:
    kept = Task(lambda: nn.Linear(2, 3)).keeping(["bias"])
    given = {"bias": torch.zeros(3)}
    with kept.held(given):
        kept.private["bias"] = torch.ones(3)
        assert kept.complete({})["bias"].tolist() == [1.0] * 3
    assert given["bias"].tolist() == [0.0] * 3  # what a device gave stays as it was
    assert kept.private["bias"].tolist() == [0.0] * 3


def test_tasks_made_of_a_task_compute_as_the_same_device() -> None:
    kept = Task(lambda: nn.Linear(2, 3)).keeping(["bias"])
    made = replace(kept, build=lambda: nn.Linear(2, 3).double().float())
    with kept.held({"bias": torch.full((3,), 7.0)}, Beside()):
        assert made.private["bias"].tolist() == [7.0] * 3
        assert made.side is kept.side is not None
    assert made.side is None
    other = Task(lambda: nn.Linear(2, 3)).keeping(["bias"])
    with kept.held({"bias": torch.ones(3)}):
        assert other.private["bias"].tolist() == [0.0] * 3


def test_turns_within_turns_keep_what_they_do_not_name() -> None:
    kept, side = Task(lambda: nn.Linear(2, 3)).keeping(["bias"]), Beside()
    with kept.held({"bias": torch.ones(3)}, side):
        with kept.held(frozen=True):
            assert (kept.private["bias"].tolist(), kept.side, kept.own.frozen) == ([1.0] * 3, side, True)
        assert (kept.side, kept.own.frozen) == (side, False)


def test_a_turn_that_fails_leaves_nothing_behind() -> None:
    kept = Task(lambda: nn.Linear(2, 3)).keeping(["bias"])
    with pytest.raises(ZeroDivisionError), kept.held({"bias": torch.ones(3)}, Beside(), frozen=True):
        raise ZeroDivisionError
    assert (kept.private["bias"].tolist(), kept.side, kept.own.frozen) == ([0.0] * 3, None, False)


def test_without_a_task_there_is_nothing_to_compute() -> None:
    with pytest.raises(RuntimeError, match=r"^this method has no task yet: bind\(task, population\) gives it one\.$"):
        UNBOUND.init(KEY)
    with pytest.raises(RuntimeError, match="has no task yet"):
        _ = UNBOUND.spec
