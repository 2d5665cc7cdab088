from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import nn

from laconic.core import ConfigError, Key, Task, isolated, read_state, tree_sha256
from laconic.models import initialize, load_state, models, num_parameters

KEY = Key.from_seed(7)


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: leaf.clone() for name, leaf in read_state(net).items()}


def test_golden_weights() -> None:
    net = models["mlp"]((4,), 3, hidden=(5,))
    initialize(net, KEY)
    assert tree_sha256(read_state(net)) == "b1f938749a09993af4252a42512bc2c1254b49f1ce4c54913cb31e25a363f735"


def test_values_are_the_written_formula_of_raw_philox_words() -> None:
    net = nn.Linear(3, 2)
    initialize(net, KEY)
    words = KEY.fold_in("weight").numpy().bit_generator.random_raw(6)
    bound = np.float32(1 / math.sqrt(3))
    expected = [np.float32((2 * (int(word) >> 40) + 1 - 2**24) / 2**24) * bound for word in words]
    assert net.weight.detach().flatten().tolist() == [float(value) for value in expected]


@pytest.mark.parametrize("name", ["lenet5", "resnet20_gn", "cifarnet"])
def test_same_key_same_bits_whatever_the_module_held_before(name: str) -> None:
    states = []
    for seed in (0, 1):
        with isolated(Key.from_seed(seed)):
            net = models[name]((1, 20, 20), 10)
            net(torch.randn(4, 1, 20, 20))  # moves running statistics
        initialize(net, KEY)
        states.append(tree_sha256(read_state(net)))
    assert states[0] == states[1]
    initialize(net, Key.from_seed(8))
    assert tree_sha256(read_state(net)) != states[0]


def test_a_leaf_depends_on_key_and_name_only() -> None:
    small, large = (models["mlp"]((4,), 3, hidden=hidden) for hidden in ((5,), (5, 6)))
    initialize(small, KEY)
    initialize(large, KEY)
    assert torch.equal(small.get_submodule("fc1").weight, large.get_submodule("fc1").weight)
    weights = [leaf.flatten()[:3] for leaf in state(large).values()]
    assert len({tuple(w.tolist()) for w in weights}) == len(weights)


def test_initialize_works_in_place_and_leaves_no_trace() -> None:
    net = models["lg_cnn"]((3, 32, 32), 10)
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in net.named_parameters()}
    generator = torch.random.get_rng_state()
    initialize(net, KEY)
    for name, parameter in net.named_parameters():
        assert (parameter, parameter.data_ptr()) == before[name]
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.grad is None
    assert torch.equal(torch.random.get_rng_state(), generator)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(300, 200),
        nn.Conv2d(24, 32, 5),
        nn.Conv2d(24, 96, 5, groups=4),
        nn.Conv1d(40, 300, 3),
        nn.ConvTranspose2d(32, 24, 5),
    ],
    ids=str,
)
def test_distribution_is_that_of_pytorch(layer: nn.Conv2d | nn.Linear) -> None:
    with isolated(Key.from_seed(0)):
        layer.reset_parameters()
    pytorch = layer.weight.detach().clone()
    bias = layer.bias.detach().clone()
    initialize(layer, KEY)
    ours = layer.weight.detach()
    bound = 1 / math.sqrt(pytorch[0].numel())
    assert not torch.equal(ours, pytorch)
    assert ours.abs().max() <= bound
    assert layer.bias.abs().max() <= bound
    assert bias.abs().max() <= bound
    n = ours.numel()
    for weight in (ours, pytorch):  # five standard errors
        assert weight.abs().max() > bound * (1 - 20 / n)
        assert abs(float(weight.mean())) < 5 * bound / math.sqrt(3 * n)
        assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=5 / math.sqrt(n))
    histogram = torch.histc(ours, bins=16, min=-bound, max=bound)
    assert float(((histogram - n / 16) ** 2 / (n / 16)).sum()) < 45  # chi-square, 15 degrees of freedom


def test_values_are_never_zero_and_symmetric_about_it() -> None:
    net = nn.Linear(1, 1 << 18, bias=False)
    initialize(net, KEY)
    weight = net.weight.detach().double()
    assert weight.abs().max() < 1
    assert bool((weight != 0).all())
    assert bool(((weight * 2**24).long() % 2 == 1).all())  # odd multiples: the grid is symmetric


def test_norm_layers_begin_as_the_identity() -> None:
    net = nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.3)
        for buffer in net.buffers():
            buffer.fill_(3)
    initialize(net, KEY)
    for name, leaf in net.state_dict().items():
        ones = name.endswith(("weight", "running_var"))
        assert torch.equal(leaf, torch.full_like(leaf, float(ones))), name


def test_norm_layers_without_parameters_are_left_in_peace() -> None:
    initialize(nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.GroupNorm(2, 4, affine=False)), KEY)


def test_other_parameters_stay_as_they_were_made() -> None:
    net = nn.Embedding(5, 3)
    before = state(net)
    initialize(net, KEY)
    assert torch.equal(net.weight, before["weight"])


def test_a_task_starts_from_the_same_weights_whatever_ran_before() -> None:
    task = Task(lambda: models["cifarnet"]((1, 8, 8), 3), initialize=initialize)
    first = task.init(KEY)
    torch.randn(3)
    assert tree_sha256(task.init(KEY)) == tree_sha256(first)
    assert {"bn1.running_mean", "bn1.running_var"} <= set(first)


def test_num_parameters_counts_frozen_ones_but_no_buffers() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    assert num_parameters(net) == 9 + 6


def test_load_state_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = {"w": torch.randn(2, 3), "b": torch.randn(3).half(), "scalar": torch.tensor(2.0), "none": torch.zeros(0, 4)}
    save_file(saved, tmp_path / "net.safetensors")
    loaded = load_state(tmp_path / "net.safetensors")
    assert tree_sha256(loaded) == tree_sha256(saved)
    (tmp_path / "net.safetensors").write_bytes(b"")
    assert tree_sha256(loaded) == tree_sha256(saved)  # not a view of the file


def test_load_state_never_unpickles(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    path = tmp_path / "net.pt"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match=r"net\.pt is not a safetensors file"):
        load_state(path)
    torch.save({"w": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match=r"net\.pt is not a safetensors file"):
        load_state(path)
    assert not (tmp_path / "exploded").exists()


def test_load_state_names_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.safetensors \(No such file"):
        load_state(tmp_path / "absent.safetensors")
    with pytest.raises(ConfigError, match="cannot read"):
        load_state(tmp_path)


GOOD = save({"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)})


def header(text: str, data: bytes = b"") -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode() + data


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 16,
        GOOD[:-1],
        GOOD + b"\0",
        header("{"),
        header("[]"),
        header(json.dumps({"w": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}), b"\0" * 4),
        header(json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), b"\0" * 4),
        header(json.dumps({"w": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}), b"\0" * 4),
        header(json.dumps({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), b"\0" * 4),
        header(json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}), b"\0" * 8),
    ],
    ids=repr,
)
def test_malformed_files_are_config_errors(tmp_path: Path, blob: bytes) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(blob)
    with pytest.raises(ConfigError, match=r"net\.safetensors is not a safetensors file") as caught:
        load_state(path)
    assert "\n" not in str(caught.value)


@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255))
def test_one_wrong_byte_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(GOOD[:at] + bytes([byte]) + GOOD[at + 1 :])
    try:
        loaded = load_state(path)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert all(isinstance(leaf, torch.Tensor) for leaf in loaded.values())
