from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import laconic.models
from laconic.core import ConfigError, Key, isolated
from laconic.models import GroupNormBlock, PadShortcut, initialize, models, num_parameters

MNIST, CIFAR, IMAGENET = (1, 28, 28), (3, 32, 32), (3, 224, 224)

COUNTS = [
    ("logistic", MNIST, 10, {}, 7_850),
    ("logistic", (20,), 1, {}, 21),
    ("mlp", MNIST, 10, {}, 50_890),
    ("mlp", (14,), 2, {"hidden": []}, 30),
    ("lg_mlp", MNIST, 10, {}, 633_226),
    ("lg_mlp", MNIST, 10, {"double_softmax": True}, 633_226),
    ("lenet5_fs", CIFAR, 10, {}, 878_538),
    ("lenet5_fs", CIFAR, 10, {"dropout": True}, 878_538),
    ("lenet5_fs", MNIST, 62, {}, 608_702),
    ("lenet5", MNIST, 10, {}, 431_080),
    ("lenet5", CIFAR, 10, {}, 657_080),
    ("lg_cnn", CIFAR, 10, {}, 64_102),
    ("lg_adult", (93,), 2, {}, 7_265),
    ("conv4", MNIST, 10, {}, 1_933_258),
    ("conv4", MNIST, 47, {}, 1_942_767),
    ("conv6", CIFAR, 10, {}, 2_262_602),
    ("conv10", CIFAR, 100, {}, 19_197_092),
    ("resnet20_gn", CIFAR, 100, {}, 275_572),
    ("resnet20_gn", CIFAR, 10, {}, 269_722),
    ("resnet20_gn", CIFAR, 10, {"groups": 4}, 269_722),
    ("resnet18", IMAGENET, 1000, {}, 11_689_512),
    ("resnet18", CIFAR, 10, {}, 11_181_642),
    ("resnet18", CIFAR, 10, {"stem": "cifar"}, 11_173_962),
    ("vgg_like", CIFAR, 10, {}, 14_719_818),
    ("vgg_like", CIFAR, 10, {"batch_norm": True}, 14_724_042),
    ("cifarnet", CIFAR, 10, {}, 1_296_074),
    ("cifarnet", MNIST, 10, {}, 1_294_922),
    ("cifarnet", CIFAR, 10, {"batch_norm": False}, 1_294_986),
    ("vqa", (3 * 16 * 16 + 16,), 1000, {}, 9_030_360),
    ("char_lstm", (80,), 90, {"hidden": 256, "layers": 2, "width": 0}, 822_570),
]

# Every entry of the catalogue at a size that runs in a moment.
SMALL = [
    ("logistic", (1, 5, 5), {}),
    ("mlp", (7,), {"hidden": [6, 5]}),
    ("lg_mlp", (1, 6, 6), {}),
    ("lg_mlp", (1, 6, 6), {"double_softmax": True}),
    ("lenet5_fs", (1, 16, 18), {}),
    ("lenet5_fs", (3, 20, 20), {"dropout": True}),
    ("lenet5", (1, 18, 16), {}),
    ("lg_cnn", (3, 16, 24), {}),
    ("lg_adult", (7,), {}),
    ("conv4", (1, 13, 10), {"width": 0.25}),
    ("conv6", (3, 8, 18), {"width": 0.25}),
    ("conv10", (3, 32, 33), {"width": 1 / 16}),
    ("resnet20_gn", (3, 9, 8), {}),
    ("resnet20_gn", (1, 8, 8), {"groups": 16}),
    ("resnet18", (3, 16, 16), {"stem": "cifar"}),
    ("resnet18", (1, 64, 72), {}),
    ("vgg_like", (3, 32, 32), {}),
    ("vgg_like", (3, 64, 64), {"batch_norm": True}),
    ("cifarnet", (1, 9, 8), {}),
    ("cifarnet", (3, 8, 8), {"batch_norm": False}),
    ("vqa", (3 * 8 * 8 + 16,), {"embedding": 4, "hidden": 3, "features": 6, "joint": 7, "width": 2}),
]


def label(case: object) -> str:
    return str(case).replace(" ", "")


def make(name: str, shape: tuple[int, ...], settings: dict[str, object], classes: int = 4) -> nn.Module:
    with isolated(Key.from_seed(0)):
        net = models.build(name, settings, given=(shape, classes))
    initialize(net, Key.from_seed(1))
    return net


def inputs(shape: tuple[int, ...], *, examples: int = 3) -> torch.Tensor:
    return torch.randn(examples, *shape, generator=Key.from_seed(2).torch())


@pytest.mark.parametrize(("name", "shape", "classes", "settings", "expected"), COUNTS, ids=label)
def test_parameter_counts_are_those_of_the_papers(
    name: str, shape: tuple[int, ...], classes: int, settings: dict[str, object], expected: int
) -> None:
    with torch.device("meta"):
        net = models.build(name, settings, given=(shape, classes))
    assert num_parameters(net) == expected


def test_counts_of_the_parts_that_papers_share() -> None:
    with torch.device("meta"):
        mlp = models["lg_mlp"](MNIST, 10)
        cnn = models["lg_cnn"](CIFAR, 10)
        vgg = models["vgg_like"](CIFAR, 10)
    assert sum(num_parameters(mlp.get_submodule(fc)) for fc in ("fc3", "fc4", "fc5")) == 99_978
    assert sum(num_parameters(mlp.get_submodule(fc)) for fc in ("fc4", "fc5")) == 34_186
    assert sum(num_parameters(cnn.get_submodule(conv)) for conv in ("conv1", "conv2")) == 2_872
    assert sum(num_parameters(m) for m in vgg if isinstance(m, nn.Conv2d)) == 14_714_688


def test_every_entry_is_tried_small_and_counted() -> None:
    # What reads tokens is tried in tests/methods/test_sequences.py.
    assert {case[0] for case in SMALL} | {"char_lstm"} == set(models) == {case[0] for case in COUNTS}


@pytest.mark.parametrize(("name", "shape", "settings"), SMALL, ids=label)
def test_forward_gradients_and_evaluation(name: str, shape: tuple[int, ...], settings: dict[str, object]) -> None:
    net = make(name, shape, settings)
    x = inputs(shape)
    with isolated(Key.from_seed(3)):  # dropout
        output = net(x)
    assert output.shape == (3, 4)
    assert output.isfinite().all()
    F.cross_entropy(output, torch.tensor([0, 1, 2])).backward()
    for leaf, parameter in net.named_parameters():
        assert parameter.grad is not None, leaf
        assert parameter.grad.isfinite().all(), leaf
        assert parameter.grad.any(), leaf

    net.eval()
    with torch.no_grad():
        assert torch.equal(net(x), net(x))


def test_leaves_have_readable_names() -> None:
    def leaves(name: str, shape: tuple[int, ...], **settings: object) -> list[str]:
        return list(make(name, shape, settings).state_dict())

    assert leaves("lenet5_fs", MNIST, dropout=True) == [
        f"{layer}.{leaf}" for layer in ("conv1", "conv2", "fc1", "fc2") for leaf in ("weight", "bias")
    ]
    assert leaves("resnet20_gn", CIFAR)[:9] == [
        "conv1.weight",
        "norm1.weight",
        "norm1.bias",
        "layer1.0.conv1.weight",
        "layer1.0.norm1.weight",
        "layer1.0.norm1.bias",
        "layer1.0.conv2.weight",
        "layer1.0.norm2.weight",
        "layer1.0.norm2.bias",
    ]
    with torch.device("meta"):
        names = set(models["resnet18"](CIFAR, 10).state_dict())
    published = {"bn1.running_mean", "layer2.0.downsample.0.weight", "layer2.0.downsample.1.bias", "fc.bias"}
    assert published <= names
    assert len(names) == 122  # as many as torchvision's


def test_layers_stand_in_the_order_of_the_computation() -> None:
    net = make("lenet5_fs", MNIST, {"dropout": True})
    order = "conv1 relu1 pool1 conv2 relu2 pool2 dropout1 flatten fc1 relu3 dropout2 fc2"
    assert [name for name, _ in net.named_children()] == order.split()
    assert net.get_submodule("dropout1").p == 0.1
    assert net.get_submodule("dropout2").p == 0.3


def test_width_scales_every_layer() -> None:
    net = make("conv4", MNIST, {"width": 0.25}, classes=10)
    widths = {name: len(leaf) for name, leaf in net.named_parameters() if name.endswith("weight")}
    assert list(widths.values()) == [16, 16, 32, 32, 64, 64, 10]


def test_double_softmax_gives_probabilities_of_the_same_network() -> None:
    plain, double = (make("lg_mlp", (9,), {"double_softmax": flag}) for flag in (False, True))
    x = inputs((9,))
    assert torch.equal(double(x), plain(x).softmax(dim=1))


def test_pad_shortcut_keeps_the_numbers_of_old_channels() -> None:
    x = inputs((2, 5, 4))
    out = PadShortcut(2, 6, stride=2)(x)
    assert out.shape == (3, 6, 3, 2)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2])
    assert not out[:, 2:].any()
    assert repr(PadShortcut(2, 6, stride=2)) == "PadShortcut(stride=2, new_channels=4)"


def test_a_block_with_a_silent_residual_passes_the_stream_on() -> None:
    block = GroupNormBlock(4, 4, stride=1, groups=2)
    nn.init.zeros_(block.norm2.weight)
    x = inputs((4, 6, 6)).abs()
    assert torch.equal(block(x), x)


def test_resnet20_has_twenty_layers_with_weights() -> None:
    net = make("resnet20_gn", CIFAR, {})
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in net.modules()) == 20
    assert sum(isinstance(m, PadShortcut) for m in net.modules()) == 2


def test_one_output_serves_regression() -> None:
    assert make("logistic", (3,), {}, classes=1)(inputs((3,))).shape == (3, 1)


@pytest.mark.parametrize(
    ("name", "shape", "needs"),
    [
        ("lenet5_fs", (3, 15, 32), "at least 16×16"),
        ("lenet5", (28, 28), "images (channels, height, width)"),
        ("lg_cnn", (784,), "images (channels, height, width)"),
        ("conv4", (1, 3, 3), "at least 4×4"),
        ("conv6", (1, 7, 8), "at least 8×8"),
        ("conv10", (1, 28, 28), "at least 32×32"),
        ("vgg_like", (1, 28, 28), "at least 32×32"),
        ("cifarnet", (1, 28), "images (channels, height, width)"),
        ("resnet20_gn", (0, 8, 8), "images (channels, height, width)"),
        ("resnet18", (3, 32, 32, 32), "images (channels, height, width)"),
        ("logistic", (), "at least one value"),
        ("mlp", (3, 0), "at least one value"),
    ],
    ids=label,
)
def test_a_shape_that_does_not_fit_is_one_sentence(name: str, shape: tuple[int, ...], needs: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models[name](shape, 10)
    sentence = str(caught.value)
    assert repr(name) in sentence
    assert f"got inputs of shape {shape}" in sentence
    assert needs in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize("name", sorted(set(models) - {"vqa", "char_lstm"}))  # whose inputs are no images
def test_the_smallest_image_that_the_error_admits_works(name: str) -> None:
    smallest = {"lenet5_fs": 16, "lenet5": 16, "lg_cnn": 16, "conv4": 4, "conv6": 8, "conv10": 32, "vgg_like": 32}
    side = smallest.get(name, 1)
    settings = {"width": 1 / 64} if name.startswith("conv") else {}
    net = make(name, (1, side, side), settings).eval()
    assert net(inputs((1, side, side))).shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("mlp", {"hidden": [8, 0]}, "hidden widths must be at least 1"),
        ("mlp", {"hiden": [8]}, "did you mean 'hidden'?"),
        ("mlp", {"hidden": 8}, "hidden"),
        ("conv4", {"width": 0.001}, "width must leave at least one channel"),
        ("conv4", {"width": -1}, "width must leave at least one channel"),
        ("resnet20_gn", {"groups": 3}, "groups must divide 16, got 3"),
        ("resnet20_gn", {"groups": 0}, "groups must divide 16, got 0"),
        ("resnet18", {"stem": "mnist"}, "'imagenet' or 'cifar'"),
        ("lenet5", {"dropout": True}, "unknown key 'dropout'"),
    ],
    ids=label,
)
def test_a_bad_setting_is_a_config_error(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        models.build(name, settings, given=(CIFAR, 10))


@pytest.mark.parametrize("width", [float("nan"), float("inf")])
def test_a_width_that_is_no_number_is_a_config_error(width: float) -> None:
    with pytest.raises(ConfigError, match="width"):
        models["conv4"](CIFAR, 10, width=width)


def test_unknown_stem_from_python_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'imagenet' or 'cifar', got 'mnist'"):
        models["resnet18"](CIFAR, 10, stem="mnist")


@pytest.mark.parametrize("name", sorted(models))
def test_no_outputs_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="at least 1 output, got 0"):
        models[name]((1, 32, 32), 0)


def test_entries_take_shape_and_classes_and_document_themselves() -> None:
    for name, function in models.items():
        parameters = list(inspect.signature(function).parameters.values())
        assert [p.name for p in parameters[:2]] == ["shape", "classes"], name
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters[2:]), name
        assert function.__doc__, name
        assert getattr(laconic.models, name) is function


def test_all_is_what_there_is() -> None:
    assert len(set(laconic.models.__all__)) == len(laconic.models.__all__)
    assert all(hasattr(laconic.models, name) for name in laconic.models.__all__)
    assert set(models) < set(laconic.models.__all__)
