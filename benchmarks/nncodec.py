"""`lean` against NNCodec (ISO/IEC 15938-17) on six real updates: bytes at equal error, and speeds.

NNCodec wants an older numpy, so it runs in an environment of its own, which is never laconic's::

    python -m venv build/nncodec && build/nncodec/bin/pip install NNCodec==2.1.3 "numpy<2"
    LACONIC_DATA=… python -m benchmarks.nncodec build/nncodec/bin/python

Both code the update alone. NNCodec has its trellis, its searched parameters and its skipped rows on, and is tried with
vectors as fine as it codes them by itself and as coarse as matrices; the better of the two counts, at each rate. Its
length at an error of ours is interpolated between two of its own points, log error over rate.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

RATES = (0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
VERSION = "2.1.3"


class Point(NamedTuple):
    """Bits per value, the error that they leave, and the seconds that they took."""

    bits: float
    nmse: float
    encode: float
    decode: float


def rival(archive: Path) -> list[Point]:
    """NNCodec's points on one update: this half runs in its environment, and imports nothing of ours."""
    # Its example applications want torchvision, which is large and no part of the race.
    for absent in (
        "torchvision",
        "torchvision.models",
        "torchvision.transforms",
        "torchmetrics",
        "torchmetrics.functional",
    ):
        sys.modules.setdefault(absent, mock.MagicMock())
    from nncodec import nn  # type: ignore[import-not-found]

    tree = {name: values.copy() for name, values in np.load(archive).items()}
    size = sum(values.size for values in tree.values())
    squares = sum(float(np.square(values, dtype=np.float64).sum()) for values in tree.values())
    # A step of 2^(qp/4), about: from six standard deviations down to a third of one.
    middle = round(4 * np.log2(np.sqrt(squares / size)))
    points = []
    for qp in range(middle - 6, middle + 15, 1):
        for vectors in (-75, qp):
            settings = {"qp": qp, "nonweight_qp": vectors, "use_dq": True, "row_skipping": True, "verbose": False}
            settings["results"] = str(archive.parent)
            with contextlib.redirect_stdout(io.StringIO()):
                began = time.perf_counter()
                stream = nn.encode({name: values.copy() for name, values in tree.items()}, settings)
                between = time.perf_counter()
                decoded = nn.decode(stream)
                ended = time.perf_counter()
            error = sum(float(np.square(decoded[n].astype(np.float64) - tree[n]).sum()) for n in tree)
            points.append(Point(8 * len(stream) / size, error / squares, between - began, ended - between))
    return points


def lower_hull(points: list[Point]) -> list[Point]:
    """The points that no other beats in both respects, by rate."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point.nmse < best[-1].nmse:
            best.append(point)
    return best


def rate_at(points: list[Point], nmse: float) -> float | None:
    """The bits at an error, between two points; None outside."""
    for a, b in itertools.pairwise(points):
        if b.nmse <= nmse <= a.nmse:
            share = np.log(a.nmse / nmse) / np.log(a.nmse / b.nmse)
            return float(a.bits + share * (b.bits - a.bits))
    return None


def ours(tree: dict[str, Any], bits: float) -> Point:
    """What `lean` makes of the same update, nearest levels."""
    import torch

    from laconic.codecs import lean
    from laconic.core import Key, Shared, spec_of

    codec, spec, shared = lean(bits=bits, mode="nearest"), spec_of(tree), Shared(Key.from_seed(0))
    began = time.perf_counter()
    blob, _ = codec.encode(tree, shared, {})
    between = time.perf_counter()
    decoded = codec.decode(blob, spec, shared)
    ended = time.perf_counter()
    vector, back = (torch.cat([leaf.flatten() for leaf in t.values()]).double() for t in (tree, decoded))
    error = float((back - vector).square().sum() / vector.square().sum())
    return Point(8 * len(blob) / len(vector), error, between - began, ended - between)


def main() -> None:
    if sys.argv[1] == "--points":
        print(json.dumps(rival(Path(sys.argv[2]))))
        return
    import torch

    from benchmarks.updates import recorded

    torch.set_num_threads(1)
    ratios, speeds = [], []
    for name, update, _, _ in recorded():
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "update.npz"
            np.savez(archive, **{leaf: np.atleast_1d(values.numpy()) for leaf, values in update.items()})
            command = [sys.argv[1], "-P", __file__, "--points", str(archive)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        theirs = lower_hull([Point(*point) for point in json.loads(said.splitlines()[-1])])
        size = sum(leaf.numel() for leaf in update.values())
        print(f"\n{name}, {size:,} values\n    bits      NMSE   NNCodec's bits   ratio", flush=True)
        for rate in RATES:
            point = ours(update, rate)
            other = rate_at(theirs, point.nmse)
            bits = other or float("nan")
            print(f"{point.bits:8.4f} {point.nmse:9.4f} {bits:16.4f} {point.bits / bits:7.3f}")
            if other:
                ratios.append(point.bits / other)
                near = min(theirs, key=lambda p: abs(p.nmse - point.nmse))
                speeds.append(
                    (size / point.encode, size / point.decode, near.encode / point.encode, near.decode / point.decode)
                )
    encode, decode, faster, faster_decode = (statistics.median(column) for column in zip(*speeds, strict=True))
    middle, worst = statistics.median(ratios), max(ratios)
    print(f"\nratio of rates at equal NMSE: median {middle:.3f}, largest {worst:.3f}, of {len(ratios)}")
    print(f"lean: encodes {encode / 1e6:.1f} million values a second, {faster:.1f} times as fast as NNCodec")
    print(f"      decodes {decode / 1e6:.1f} million values a second, {faster_decode:.1f} times as fast")


if __name__ == "__main__":
    main()
