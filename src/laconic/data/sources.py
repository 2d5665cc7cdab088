"""Datasets by name, in the catalogue `sources`. Python and a configuration use the same names and settings::

    lc.data.digits(clients=50, partition={"kind": "dirichlet", "alpha": 0.3})

    [data]
    source = "digits"
    clients = 50
    partition = { kind = "dirichlet", alpha = 0.3 }

Images are channel-first float32. `normalize` says how pixels become inputs: `unit` leaves them in [0, 1],
`symmetric` makes it [-1, 1], and the names of datasets stand for their mean and standard deviation. `limit` takes
the first training examples only, for quick trials.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.core import DataError, Key, Registry
from laconic.data.adult import adult
from laconic.data.arrays import as_inputs
from laconic.data.digits import digits
from laconic.data.federation import Federation, pooled
from laconic.data.frames import tabular
from laconic.data.holdout import check_limit, hold_out
from laconic.data.images import Scaling, scale
from laconic.data.partition import PartitionSpec
from laconic.data.synthetic import synthetic
from laconic.data.tables import Place, Split, has_split, read_split
from laconic.data.texts import leaf, shakespeare
from laconic.data.vqa import easy_vqa


@dataclass(frozen=True)
class _Layout:
    """Where a dataset lies and what its columns are called."""

    place: Place
    classes: int | None
    channels: int | None
    image: str = "image"
    label: str = "label"
    group: str | None = None
    coarse: str | None = None
    size: int | None = None
    test_fraction: float | None = None  # held out of the training split, where there is no test split


def mnist(
    *,
    clients: int = 100,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "mnist",
) -> Federation:
    """MNIST: 60,000 + 10,000 digits, 1×28×28 (`mnist`, or `ylecun/mnist` from the hub)."""
    layout = _Layout(Place("mnist", ("mnist",), "ylecun/mnist"), classes=10, channels=1)
    return _load(layout, clients, partition, seed, limit, normalize)


def fashion_mnist(
    *,
    clients: int = 100,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "fashion_mnist",
) -> Federation:
    """Fashion-MNIST: 60,000 + 10,000 garments, 1×28×28 (`zalando-datasets/fashion_mnist`)."""
    place = Place("fashion_mnist", ("fashion_mnist",), "zalando-datasets/fashion_mnist")
    return _load(_Layout(place, classes=10, channels=1), clients, partition, seed, limit, normalize)


def emnist(
    *,
    clients: int = 100,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "mnist",
    hub: str = "randall-lab/emnist",
) -> Federation:
    """EMNIST balanced: letters and digits in 47 classes, 1×28×28.

    The folder `emnist` is the official split; `emnist_balanced_subset` is a smaller one, and the federation's name
    says so.
    """
    place = Place("emnist", ("emnist", "emnist_balanced_subset"), hub, "balanced")
    folder = place.folder()
    name = "emnist" if folder is None else folder.name
    layout = _Layout(place, classes=47, channels=1)
    return _load(layout, clients, partition, seed, limit, normalize, name=name)


def femnist(
    *,
    clients: int | None = None,
    partition: PartitionSpec = "groups",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "unit",
    test_fraction: float = 0.1,
) -> Federation:
    """FEMNIST: characters in 62 classes by some 3,500 writers, 1×28×28 (`flwrlabs/femnist`).

    Every writer is a client, and `test_fraction` of each writer's examples is held out, the same for every seed.
    """
    layout = _Layout(
        Place("femnist", ("femnist",), "flwrlabs/femnist"),
        classes=62,
        channels=1,
        label="character",
        group="writer_id",
        test_fraction=test_fraction,
    )
    return _load(layout, clients, partition, seed, limit, normalize)


def mnist_by_writer(
    *,
    clients: int | None = None,
    partition: PartitionSpec = "groups",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "mnist",
    test_fraction: float = 0.1,
) -> Federation:
    """MNIST's 70,000 digits by their 836 writers, in FEMNIST's layout (folder `mnist_by_writer` only)."""
    layout = _Layout(
        Place("mnist_by_writer", ("mnist_by_writer",)),
        classes=10,
        channels=1,
        label="character",
        group="writer_id",
        test_fraction=test_fraction,
    )
    return _load(layout, clients, partition, seed, limit, normalize)


def cifar10(
    *,
    clients: int = 100,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "imagenet",
) -> Federation:
    """CIFAR-10: 50,000 + 10,000 colour images, 3×32×32 (`uoft-cs/cifar10`).

    The default scaling is that of the LG-FedAvg experiments; FedPM's are `symmetric`.
    """
    layout = _Layout(Place("cifar10", ("cifar10",), "uoft-cs/cifar10"), classes=10, channels=3, image="img")
    return _load(layout, clients, partition, seed, limit, normalize)


def cifar100(
    *,
    clients: int = 500,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "imagenet",
) -> Federation:
    """CIFAR-100: 50,000 + 10,000 colour images in 100 classes, 3×32×32 (`uoft-cs/cifar100`).

    It has coarse labels, so `partition="pachinko"` serves.
    """
    layout = _Layout(
        Place("cifar100", ("cifar100",), "uoft-cs/cifar100"),
        classes=100,
        channels=3,
        image="img",
        label="fine_label",
        coarse="coarse_label",
    )
    return _load(layout, clients, partition, seed, limit, normalize)


def svhn(
    *,
    clients: int = 100,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "symmetric",
) -> Federation:
    """SVHN, cropped: 73,257 + 26,032 house numbers, 3×32×32 (`ufldl-stanford/svhn`)."""
    place = Place("svhn", ("svhn",), "ufldl-stanford/svhn", "cropped_digits")
    return _load(_Layout(place, classes=10, channels=3), clients, partition, seed, limit, normalize)


def gtsrb(
    *,
    clients: int = 100,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "symmetric",
    size: int = 32,
) -> Federation:
    """German traffic signs in 43 classes, resized to 3×`size`×`size` (`tanganke/gtsrb`)."""
    place = Place("gtsrb", ("gtsrb",), "tanganke/gtsrb")
    layout = _Layout(place, classes=43, channels=3, size=size)
    return _load(layout, clients, partition, seed, limit, normalize)


def parquet(
    *,
    path: str,
    clients: int | None = 100,
    partition: PartitionSpec = "iid",
    seed: int = 0,
    limit: int | None = None,
    normalize: Scaling = "unit",
    image: str = "image",
    label: str = "label",
    group: str | None = None,
    coarse: str | None = None,
    config: str | None = None,
    classes: int | None = None,
    size: int | None = None,
    test_fraction: float = 0.2,
) -> Federation:
    """Any dataset in the hub's layout: a folder, a folder in `LACONIC_DATA`, or a hub id such as `user/name`.

    Reads the splits `train` and `test`; where there is no `test`, `test_fraction` is held out. The column
    `image` holds encoded images, or lists of numbers (which `normalize` leaves alone). Labels may be text.
    """
    hub = path if path.count("/") == 1 and not path.startswith((".", "/", "~")) else None
    own = Path(path).expanduser()
    place = Place("parquet", (str(own.resolve()) if own.is_dir() else path,), hub, config)
    held = None if has_split(place, "test") else test_fraction
    layout = _Layout(place, classes, None, image, label, group, coarse, size, held)
    return _load(layout, clients, partition, seed, limit, normalize, name=path)


sources: Registry[Federation] = Registry(
    "dataset",
    [
        digits,
        synthetic,
        mnist,
        fashion_mnist,
        emnist,
        femnist,
        mnist_by_writer,
        cifar10,
        cifar100,
        svhn,
        gtsrb,
        adult,
        easy_vqa,
        shakespeare,
        leaf,
        tabular,
        parquet,
    ],
    section="data",
)
"""All datasets by name."""


def _load(
    layout: _Layout,
    clients: int | None,
    partition: PartitionSpec,
    seed: int,
    limit: int | None,
    normalize: str,
    *,
    name: str | None = None,
) -> Federation:
    name = name or layout.place.name
    check_limit(limit, name)
    columns = [column for column in (layout.label, layout.group, layout.coarse) if column is not None]

    def read(split: str, rows: int | None) -> Split:
        return read_split(
            layout.place,
            split,
            image=layout.image,
            columns=columns,
            channels=layout.channels,
            size=layout.size,
            limit=rows,
        )

    train = read("train", limit)
    parts = [train] if layout.test_fraction is not None else [train, read("test", None)]
    if any(part.inputs.shape[1:] != train.inputs.shape[1:] for part in parts):
        raise DataError(f"{name}: train and test hold inputs of different shapes; set size to make them alike.")
    inputs = np.concatenate([part.inputs for part in parts]) if len(parts) > 1 else train.inputs
    values = {column: np.concatenate([part.columns[column] for part in parts]) for column in columns}
    labels = _class_numbers(values[layout.label], f"{name}: column {layout.label!r}")
    groups = None if layout.group is None else _numbers(values[layout.group])
    num_train = len(train.inputs)
    if layout.test_fraction is not None:
        kept, held = hold_out(
            labels if groups is None else groups,
            fraction=layout.test_fraction,
            key=Key.from_seed(0).fold_in(layout.place.name),
            every=groups is not None,
        )
        order = np.concatenate([kept, held])
        inputs, labels, num_train = inputs[order], labels[order], len(kept)
        groups = None if groups is None else groups[order]
        values = {column: array[order] for column, array in values.items()}
    classes = layout.classes or int(labels.max(initial=-1)) + 1
    coarse = None if layout.coarse is None else _coarse_of(labels, values[layout.coarse], classes, name)
    x = scale(inputs, normalize) if inputs.dtype == np.uint8 else as_inputs(inputs, where=f"{name} inputs")
    return pooled(
        name,
        x,
        torch.from_numpy(labels),
        num_train=num_train,
        clients=clients,
        partition=partition,
        seed=seed,
        classes=classes,
        groups=groups,
        coarse=coarse,
    )


def _numbers(values: NDArray[Any]) -> NDArray[np.int64]:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _class_numbers(values: NDArray[Any], where: str) -> NDArray[np.int64]:
    if values.dtype.kind == "U":
        return _numbers(values)
    if values.dtype.kind not in "iub":
        raise DataError(f"{where} has the type {values.dtype}; labels are whole numbers or text.")
    labels = values.astype(np.int64)
    if labels.min(initial=0) < 0:
        raise DataError(f"{where} has the label {labels.min()}; classes are numbered from 0 on.")
    return labels


def _coarse_of(labels: NDArray[np.int64], coarse: NDArray[Any], classes: int, name: str) -> NDArray[np.int64]:
    """The coarse label of each class, which must be one."""
    numbers = _numbers(coarse)
    table = np.zeros(classes, dtype=np.int64)
    if labels.max(initial=0) >= classes:
        raise DataError(f"{name}: the label {labels.max()} does not exist among {classes} classes.")
    table[labels] = numbers
    if not np.array_equal(table[labels], numbers):
        raise DataError(f"{name}: a label has more than one coarse label; are the two columns interchanged?")
    return table
