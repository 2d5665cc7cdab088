from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import laconic.data
from laconic.core import ConfigError, DataError
from laconic.data import sources
from laconic.data.cache import cache_folder, load_cached, save_cached

Write = Callable[..., list[np.ndarray]]
Need = Callable[[str], Path]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


def numbers(count: int, classes: int) -> list[int]:
    return [i % classes for i in range(count)]


# --- what every source has


def test_python_and_configuration_take_the_same_settings() -> None:
    for name in sources:
        assert getattr(laconic.data, name) is sources[name]
        parameters = inspect.signature(sources[name]).parameters.values()
        assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
        assert {"clients", "seed"} <= {parameter.name for parameter in parameters}


def test_from_a_configuration() -> None:
    settings = {"clients": 12, "partition": {"kind": "dirichlet", "alpha": 0.3}, "seed": 2}
    one = sources.build("digits", settings)
    two = laconic.data.digits(clients=12, partition={"kind": "dirichlet", "alpha": 0.3}, seed=2)
    assert torch.equal(one.client(3).train.index, two.client(3).train.index)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("digit", {}, "did you mean 'digits'"),
        ("digits", {"client": 3}, "did you mean 'clients'"),
        ("digits", {"clients": "many"}, "clients"),
        ("digits", {"partition": 3}, "partition must be a name"),
        ("mnist", {"normalize": "mnits"}, "normalize"),
        ("parquet", {}, "'path' is required"),
    ],
)
def test_configuration_errors(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sources.build(name, settings)


def test_all_names_exist() -> None:
    assert all(hasattr(laconic.data, name) for name in laconic.data.__all__)


# --- embedded sources


def test_digits() -> None:
    federation = laconic.data.digits(clients=50)
    assert federation.shape == (1, 8, 8)
    assert federation.x.dtype == torch.float32
    assert float(federation.x.min()) == 0
    assert float(federation.x.max()) == 1
    assert (len(federation.train), len(federation.test)) == (1438, 359)
    counts = np.bincount(federation.test.tensors()[1])
    assert counts.min() >= 34
    assert counts.max() <= 38
    other = laconic.data.digits(clients=50, seed=1)
    assert torch.equal(federation.test.tensors()[0], other.test.tensors()[0])
    assert not torch.equal(federation.client(0).train.index, other.client(0).train.index)


def test_digits_limit() -> None:
    federation = laconic.data.digits(clients=5, limit=100)
    assert (len(federation.train), len(federation.test)) == (100, 359)
    with pytest.raises(DataError, match="limit must be at least 1, got -3"):
        laconic.data.digits(limit=-3)


def test_synthetic_teachers_are_found_by_least_squares() -> None:
    settings = {"clients": 6, "features": 4, "rho": 0.5, "seed": 3}
    federation = laconic.data.synthetic(train_examples=4000, test_examples=10, noise=0.5, **settings)
    _, teachers = laconic.data.linear_teachers(**settings)
    assert federation.kind == "regression"
    assert len(federation.test) == 60
    for client in range(6):
        x, y = federation.client(client).train.tensors()
        solved = torch.linalg.lstsq(x, y).solution[:, 0]
        assert torch.allclose(solved, teachers[client].float(), atol=0.08)
        residual = y[:, 0] - x @ teachers[client].float()
        assert 0.48 < float(residual.std()) < 0.52
        assert len(federation.client(client).test) == 10
    assert -1 <= float(federation.x.min()) < -0.99
    assert 0.99 < float(federation.x.max()) <= 1


def test_synthetic_errors() -> None:
    with pytest.raises(DataError, match="features must be at least 1, got 0"):
        laconic.data.synthetic(features=0)
    with pytest.raises(DataError, match="can't be negative"):
        laconic.data.synthetic(rho=-1.0)


# --- sources in the hub's layout, on a few rows made here


@pytest.mark.parametrize(
    ("name", "folder", "image", "shape", "classes"),
    [
        ("mnist", "mnist", "image", (28, 28), 10),
        ("fashion_mnist", "fashion_mnist", "image", (28, 28), 10),
        ("emnist", "emnist_balanced_subset", "image", (28, 28), 47),
        ("cifar10", "cifar10", "img", (32, 32, 3), 10),
        ("svhn", "svhn", "image", (32, 32, 3), 10),
    ],
)
def test_labelled_images(
    root: Path, write_split: Write, name: str, folder: str, image: str, shape: tuple[int, ...], classes: int
) -> None:
    kind = "WEBP" if len(shape) == 3 else "PNG"
    pixels = write_split(root / folder, "train", {"label": numbers(40, 10)}, image=image, shape=shape, kind=kind)
    write_split(root / folder, "test", {"label": numbers(20, 10)}, image=image, shape=shape, kind=kind)
    federation = sources.build(name, {"clients": 4, "normalize": "unit"})
    channels = 3 if len(shape) == 3 else 1
    assert federation.shape == (channels, *shape[:2])
    assert federation.classes == classes
    assert (len(federation.train), len(federation.test)) == (40, 20)
    expected = pixels[7].reshape(*shape[:2], channels).transpose(2, 0, 1) / np.float32(255)
    assert torch.equal(federation.x[7], torch.from_numpy(expected))
    assert federation.y[:40].tolist() == numbers(40, 10)
    again = sources.build(name, {"clients": 4, "normalize": "unit"})
    assert torch.equal(again.x, federation.x)


def test_scaling(root: Path, write_split: Write) -> None:
    pixels = write_split(root / "cifar10", "train", {"label": [0] * 6}, image="img", shape=(32, 32, 3))
    write_split(root / "cifar10", "test", {"label": [1]}, image="img", shape=(32, 32, 3))
    raw = torch.from_numpy(pixels[0]).permute(2, 0, 1).float() / 255
    imagenet = laconic.data.cifar10(clients=2).x[0]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(imagenet, (raw - mean[:, None, None]) / std[:, None, None], atol=1e-6)
    symmetric = laconic.data.cifar10(clients=2, normalize="symmetric").x[0]
    assert torch.allclose(symmetric, (raw - 0.5) / 0.5, atol=1e-6)


def test_scaling_for_other_channels(root: Path, write_split: Write) -> None:
    for split in ("train", "test"):
        write_split(root / "mnist", split, {"label": [0, 1]})
    with pytest.raises(ConfigError, match="for 3 channels, but these images have 1"):
        laconic.data.mnist(clients=2, normalize="imagenet")


def test_cifar100_with_pachinko(root: Path, write_split: Write) -> None:
    fine = numbers(400, 100)
    columns = {"fine_label": fine, "coarse_label": [label // 5 for label in fine]}
    write_split(root / "cifar100", "train", columns, image="img", shape=(32, 32, 3))
    write_split(root / "cifar100", "test", columns, image="img", shape=(32, 32, 3))
    federation = laconic.data.cifar100(clients=20, partition="pachinko")
    assert [federation.examples(i) for i in range(20)] == [16] * 20
    assert [len(federation.client(i).test) for i in range(20)] == [4] * 20
    assert len(federation.test) == 400
    assert federation.classes == 100


def test_coarse_labels_must_be_coarse(root: Path, write_split: Write) -> None:
    fine = numbers(40, 10)
    columns = {"fine_label": [label // 5 for label in fine], "coarse_label": fine}
    for split in ("train", "test"):
        write_split(root / "cifar100", split, columns, image="img", shape=(32, 32, 3))
    with pytest.raises(DataError, match="are the two columns interchanged"):
        laconic.data.cifar100(clients=2, partition="pachinko")


def test_femnist(root: Path, write_split: Write) -> None:
    writers = [f"f{i // 10:04d}_{i % 2}" for i in range(60)]
    columns = {"writer_id": writers, "hsf_id": [0] * 60, "character": numbers(60, 62)}
    write_split(root / "femnist", "train", columns)
    federation = laconic.data.femnist(test_fraction=0.2)
    assert federation.num_clients == 12
    assert federation.classes == 62
    assert [federation.examples(i) for i in range(12)] == [4] * 12
    assert [len(federation.client(i).test) for i in range(12)] == [1] * 12
    assert len(federation.test) == 12
    few = laconic.data.femnist(clients=3)
    assert few.num_clients == 3
    assert len(few.test) == 3
    assert few.dropped == 36
    assert laconic.data.femnist(clients=4, partition="iid").num_clients == 4


def test_gtsrb_is_resized(root: Path, write_split: Write) -> None:
    sizes = [(20 + i, 30 + i) for i in range(10)]
    for split in ("train", "test"):
        write_split(root / "gtsrb", split, {"label": numbers(10, 43)}, shape=(0, 0, 3), sizes=sizes)
    federation = laconic.data.gtsrb(clients=2)
    assert federation.shape == (3, 32, 32)
    assert federation.classes == 43
    assert laconic.data.gtsrb(clients=2, size=24).shape == (3, 24, 24)


def test_limit_takes_the_first_rows(root: Path, write_split: Write) -> None:
    write_split(root / "mnist", "train", {"label": numbers(40, 10)}, files=3)
    write_split(root / "mnist", "test", {"label": numbers(9, 10)})
    fresh = laconic.data.mnist(clients=2, limit=17)
    whole = laconic.data.mnist(clients=2)
    cached = laconic.data.mnist(clients=2, limit=17)
    assert torch.equal(fresh.x[:17], whole.x[:17])
    assert torch.equal(fresh.x, cached.x)
    assert fresh.y.tolist() == numbers(17, 10) + numbers(9, 10)


# --- parquet


def test_parquet_of_any_folder(tmp_path: Path, write_split: Write) -> None:
    folder = tmp_path / "animals"
    columns = {"kind": ["cat", "dog", "emu", "dog"] * 10, "place": ["here", "there"] * 20}
    write_split(folder, "train", columns, image="picture", shape=(9, 9, 3))
    settings = {"path": str(folder), "image": "picture", "label": "kind", "clients": 4}
    federation = sources.build("parquet", settings)
    assert federation.classes == 3
    assert federation.shape == (3, 9, 9)
    assert (len(federation.train), len(federation.test)) == (32, 8)
    by_place = laconic.data.parquet(
        path=str(folder), image="picture", label="kind", group="place", partition="groups", clients=None
    )
    assert by_place.num_clients == 2


def test_parquet_folder_in_laconic_data(root: Path, write_split: Write) -> None:
    write_split(root / "mine", "train", {"label": numbers(20, 2)})
    write_split(root / "mine", "test", {"label": numbers(10, 2)})
    federation = laconic.data.parquet(path="mine", clients=2)
    assert len(federation.test) == 10
    assert federation.shape == (1, 28, 28)


def test_parquet_of_numbers(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((30, 4)).tolist()
    pq.write_table(pa.table({"features": values, "label": numbers(30, 3)}), tmp_path / "train.parquet")
    federation = laconic.data.parquet(path=str(tmp_path), image="features", clients=3)
    assert federation.shape == (4,)


def test_parquet_errors(tmp_path: Path, write_split: Write) -> None:
    folder = tmp_path / "set"
    write_split(folder, "train", {"label": numbers(6, 2)}, sizes=[(5, 5)] * 5 + [(6, 5)])
    with pytest.raises(DataError, match="no column 'target'; it has image, label"):
        laconic.data.parquet(path=str(folder), label="target")
    with pytest.raises(DataError, match="row 5 is 5×6 pixels, but the first image is 5×5; set size"):
        laconic.data.parquet(path=str(folder), clients=2)
    assert laconic.data.parquet(path=str(folder), clients=2, size=5).shape == (1, 5, 5)
    with pytest.raises(DataError, match="should hold images or lists of numbers"):
        laconic.data.parquet(path=str(folder), image="label", label="label", clients=2)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"holds no train-\*.parquet"):
        laconic.data.parquet(path=str(empty), clients=2)
    (empty / "train.parquet").write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(DataError, match="is it a complete parquet file"):
        laconic.data.parquet(path=str(empty), clients=2)


def test_damaged_and_missing_images(tmp_path: Path) -> None:
    images = [{"bytes": b"no image", "path": None}]
    pq.write_table(pa.table({"image": images, "label": [0]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="row 0 is no readable image"):
        laconic.data.parquet(path=str(tmp_path), clients=1)
    missing = pa.array([{"bytes": None, "path": "a.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    pq.write_table(pa.table({"image": missing, "label": [0]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="row 0 holds no image bytes"):
        laconic.data.parquet(path=str(tmp_path), clients=1)
    pq.write_table(pa.table({"image": images, "label": pa.array([None], pa.int64())}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="'label' has 1 missing values"):
        laconic.data.parquet(path=str(tmp_path), clients=1)


# --- when the data is not there


def _without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)


def test_no_folder_and_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_library(monkeypatch)
    with pytest.raises(DataError, match=r"mnist: LACONIC_DATA is not set .* mnist/.*laconic\[data\]"):
        laconic.data.mnist()
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path))
    with pytest.raises(DataError, match=rf"no folder {tmp_path}/cifar10 \(LACONIC_DATA is"):
        laconic.data.cifar10()
    with pytest.raises(DataError, match=r"no folder .*mnist_by_writer"):
        laconic.data.mnist_by_writer()
    with pytest.raises(DataError, match=r"put adult.data and adult.test"):
        laconic.data.adult()
    with pytest.raises(DataError, match=r"no folder .*nowhere"):
        laconic.data.parquet(path="nowhere")


class FakeImage:
    def __init__(self, decode: bool = True) -> None:
        self.decode = decode


class FakeDataset:
    """The few calls of `datasets.Dataset` that reading from the hub makes."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.column_names = table.column_names
        self.features = {name: FakeImage() if name == "image" else None for name in table.column_names}

    def __len__(self) -> int:
        return len(self.table)

    def cast_column(self, name: str, feature: FakeImage) -> FakeDataset:
        assert not feature.decode
        return self

    def select(self, rows: range) -> FakeDataset:
        return FakeDataset(self.table.slice(rows.start, len(rows)))

    def select_columns(self, names: list[str]) -> FakeDataset:
        return FakeDataset(self.table.select(names))

    def with_format(self, kind: str) -> pa.Table:
        assert kind == "arrow"
        return self.table


def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_split: Write) -> None:
    write_split(tmp_path / "svhn", "train", {"label": numbers(20, 10)}, shape=(32, 32, 3))
    write_split(tmp_path / "svhn", "test", {"label": numbers(10, 10)}, shape=(32, 32, 3))
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path))
    local = laconic.data.svhn(clients=2, limit=15)
    monkeypatch.delenv("LACONIC_DATA")
    asked = []

    def load_dataset(hub: str, config: str | None, *, split: str) -> FakeDataset:
        asked.append((hub, config, split))
        return FakeDataset(pq.read_table(tmp_path / "svhn" / f"{split}-00000-of-00001.parquet"))

    fake = types.SimpleNamespace(load_dataset=load_dataset, Image=FakeImage)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    remote = laconic.data.svhn(clients=2, limit=15)
    assert torch.equal(local.x, remote.x)
    assert asked == [("ufldl-stanford/svhn", "cropped_digits", split) for split in ("train", "test")]


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no network\nand a long traceback")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"LACONIC_DATA is not set .*'ylecun/mnist' .*no network\)\.$"):
        laconic.data.mnist()


# --- the cache


def test_cache_is_used_and_follows_the_file(root: Path, write_split: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        write_split(root / "mnist", split, {"label": numbers(12, 10)})
    first = laconic.data.mnist(clients=2)
    assert len(list((cache_folder() / "decoded").glob("*.npy"))) == 2
    with monkeypatch.context() as patch:
        patch.setattr("laconic.data.tables.decode", lambda *_, **__: pytest.fail("decoded again"))
        assert torch.equal(laconic.data.mnist(clients=2).x, first.x)
    write_split(root / "mnist", "train", {"label": numbers(13, 10)})
    assert len(laconic.data.mnist(clients=2).train) == 13


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"garbage" * 100])
def test_damaged_cache_is_made_anew(root: Path, write_split: Write, damage: bytes) -> None:
    for split in ("train", "test"):
        write_split(root / "mnist", split, {"label": numbers(12, 10)})
    first = laconic.data.mnist(clients=2)
    files = sorted((cache_folder() / "decoded").glob("*.npy"))
    for file in files:
        file.write_bytes(damage)
    assert torch.equal(laconic.data.mnist(clients=2).x, first.x)
    assert all(len(np.load(file)) == 12 for file in files)


def test_truncated_or_foreign_cache_is_ignored(root: Path) -> None:
    save_cached("key", np.zeros((3, 1, 2, 2), np.uint8))
    assert load_cached("key", rows=3) is not None
    assert load_cached("key", rows=4) is None
    path = cache_folder() / "decoded" / "key.npy"
    path.write_bytes(path.read_bytes()[:-3])
    assert load_cached("key", rows=3) is None
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert load_cached("key", rows=1) is None
    np.save(path, np.zeros((3, 1, 2, 2)))
    assert load_cached("key", rows=3) is None


def test_cache_that_cannot_be_written(root: Path, write_split: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        write_split(root / "mnist", split, {"label": numbers(12, 10)})
    blocked = root / "a file, not a folder"
    blocked.write_text("")
    monkeypatch.setenv("LACONIC_CACHE", str(blocked))
    assert len(laconic.data.mnist(clients=2).train) == 12


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "a"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("LACONIC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "b" / "laconic"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "laconic"


# --- real data


@pytest.mark.data
def test_real_mnist(real_data: Need) -> None:
    real_data("mnist")
    federation = laconic.data.mnist(clients=100, partition="label_shards")
    assert (len(federation.train), len(federation.test)) == (60_000, 10_000)
    assert federation.shape == (1, 28, 28)
    assert abs(float(federation.train.tensors()[0].mean())) < 1e-3
    assert abs(float(federation.train.tensors()[0].std()) - 1) < 1e-3
    assert (federation.label_counts() > 0).sum(axis=1).max() == 2
    assert federation.y[:5].tolist() == [5, 0, 4, 1, 9]


@pytest.mark.data
def test_real_fashion_mnist(real_data: Need) -> None:
    real_data("fashion_mnist")
    federation = laconic.data.fashion_mnist(clients=10, limit=2000)
    assert (len(federation.train), len(federation.test)) == (2000, 10_000)
    assert abs(float(federation.test.tensors()[0].mean())) < 0.02


@pytest.mark.data
def test_real_emnist_subset_says_so(real_data: Need) -> None:
    real_data("emnist_balanced_subset")
    federation = laconic.data.emnist(clients=10, limit=2000)
    assert federation.name == "emnist_balanced_subset"
    assert len(federation.test) == 4700
    assert np.unique(federation.test.tensors()[1]).tolist() == list(range(47))


@pytest.mark.data
def test_real_mnist_by_writer(real_data: Need) -> None:
    real_data("mnist_by_writer")
    federation = laconic.data.mnist_by_writer()
    assert federation.num_clients == 836
    assert federation.dropped == 0
    assert len(federation.train) + len(federation.test) == 70_000
    assert all(len(federation.client(i).test) >= 1 for i in range(836))


@pytest.mark.data
def test_real_cifar10(real_data: Need) -> None:
    real_data("cifar10")
    federation = laconic.data.cifar10(clients=10, limit=1000)
    assert federation.shape == (3, 32, 32)
    assert (len(federation.train), len(federation.test)) == (1000, 10_000)
    assert federation.y[:3].tolist() == [6, 9, 9]
    assert np.bincount(federation.test.tensors()[1]).tolist() == [1000] * 10


@pytest.mark.data
def test_real_adult(real_data: Need) -> None:
    real_data("adult")
    federation = laconic.data.adult()
    assert federation.shape == (93,)
    assert (len(federation.train), len(federation.test)) == (15_470, 15_470)
    assert federation.classes == 2
    x, y = federation.train.tensors()
    assert float(x.mean(dim=0).abs().max()) < 1e-4
    assert abs(int(y.sum()) - int(federation.test.tensors()[1].sum())) <= 1
    assert federation.protected is not None
    white, male = federation.protected.mean(dim=0).tolist()
    assert white == pytest.approx(27_816 / 30_940)
    assert 0.6 < male < 0.75


@pytest.mark.data
def test_real_adult_in_shards(real_data: Need) -> None:
    real_data("adult")
    federation = laconic.data.adult(rows=30_000, partition="sorted_shards")
    assert federation.shape == (93,)
    assert (len(federation.train), len(federation.test), federation.dropped) == (15_000, 15_000, 0)
    assert [federation.examples(i) for i in range(10)] == [1500] * 10
    assert [len(federation.client(i).test) for i in range(10)] == [1500] * 10
    official = laconic.data.adult(test="official", limit=1000)
    assert (len(official.train), len(official.test)) == (1000, 15_507)


def test_adult_that_is_not_adult(root: Path) -> None:
    (root / "adult").mkdir(parents=True)
    with pytest.raises(DataError, match=r"adult.data cannot be read \(No such file"):
        laconic.data.adult()
    (root / "adult" / "adult.data").write_text("a, b, c\n")
    with pytest.raises(DataError, match=r"line 1 of .* is no record of 15 columns"):
        laconic.data.adult()
    with pytest.raises(DataError, match="rows must be at least 2"):
        laconic.data.adult(rows=0)
