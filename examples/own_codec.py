"""A codec of one's own: signs with a scale for every row of a matrix, in Python and by name."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

import laconic as lc
from laconic.codecs import CodecId, Entropy, Pipeline, by_leaf, ef, float32
from laconic.testing import check_codec


@dataclass(frozen=True)
class RowSigns:
    """± the mean magnitude of the row (of a vector: of all values). `shaped` makes it a stage that sees shapes."""

    floor: float = 0.0
    rows: int = 1
    quantizes = True

    def shaped(self, shape):
        return RowSigns(self.floor, shape[0] if len(shape) > 1 else 1)

    def encode(self, values, key, sink, rest):
        for row in values.view(self.rows, -1):
            sink.write_scale(max(float(row.abs().mean()), self.floor))
        rest((values < 0).to(torch.uint8), 2)

    def decode(self, source, size, key, rest):
        scales = torch.tensor([source.read_scale() for _ in range(self.rows)])
        signs = 1.0 - 2.0 * rest(size, 2)
        return (signs.view(self.rows, -1) * scales[:, None]).view(-1)


def row_signs(*, floor: float = 0.0) -> Pipeline:
    """What a configuration names: up = "own_codec:row_signs", or with a setting "own_codec:row_signs:floor=0.001"."""
    return Pipeline((RowSigns(floor),), Entropy(), text="row_signs", id=CodecId.CUSTOM, per_leaf=True)


def main(rounds: int = 15) -> None:
    check_codec(row_signs())  # the laws that every codec obeys; silence is consent
    with contextlib.chdir(Path(__file__).parent):  # modules are looked for in the current folder
        named = lc.codecs.parse("ef(own_codec:row_signs:floor=0.00001)")
    data = lc.data.digits(clients=20, partition={"kind": "dirichlet", "alpha": 1.0})
    method = lc.fedavg(solver=lc.Solver(lr=0.2, local_epochs=2))
    for up in ("ef(signsgd)", ef(row_signs()), named, ef(by_leaf({"*.bias": float32(), "*": row_signs()}))):
        run = lc.fit(method=method, data=data, up=up, rounds=rounds, cohort=10, eval_every=rounds, workers=0)
        summary = run.summary
        print(f"{summary['up']:45}{summary['global_accuracy']:7.3f}{summary['bits_per_parameter_up']:7.2f} bits up")


if __name__ == "__main__":
    main()
