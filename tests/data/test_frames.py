"""Tables as federations: pandas, arrow, CSV, parquet, mappings, torch datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import laconic as lc
from laconic.core import DataError
from laconic.data import from_dataset, from_table


def patients(rows: int = 40) -> pd.DataFrame:
    """Patients of three wards of unequal size."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": rng.integers(20, 80, rows),
            "weight": np.where(np.arange(rows) % 7 == 0, np.nan, rng.normal(70, 9, rows)),
            "blood": rng.choice(["A", "B", "0"], rows),
            "ward": np.array(["east", "west", "west", "north"])[np.arange(rows) % 4],
            "ill": np.array(["no", "yes"])[np.arange(rows) % 2],
        }
    )


def test_every_value_of_a_column_is_a_client() -> None:
    data = from_table(patients(), label="ill", client="ward")
    assert (data.num_clients, data.shape, data.classes) == (3, (5,), 2)
    assert sorted(data.examples(c) for c in range(3)) == [8, 8, 16]
    train = data.train.tensors()[0]
    assert torch.allclose(train[:, 0].mean(), torch.tensor(0.0), atol=1e-5)
    assert torch.allclose(train[:, 0].std(correction=0), torch.tensor(1.0), atol=1e-5)
    assert set(data.x[:, 2:].unique().tolist()) == {0.0, 1.0}
    assert bool((data.x[:, 2:].sum(dim=1) == 1).all())


def test_files_give_what_the_frame_gives(tmp_path: Path) -> None:
    frame = patients()
    frame.to_csv(tmp_path / "patients.csv", index=False)
    frame.to_parquet(tmp_path / "patients.parquet")
    frame["blood"] = frame["blood"].astype("category")
    first = from_table(frame, label="ill", client="ward")
    for kind in ("csv", "parquet"):
        read = lc.data.tabular(path=str(tmp_path / f"patients.{kind}"), label="ill", client="ward")
        assert torch.equal(read.x, first.x)
        assert torch.equal(read.y, first.y)


class Hub:
    """What is used of a Hugging Face dataset."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame

    def with_format(self, kind: str) -> Hub:
        assert kind == "arrow"
        return self

    def __getitem__(self, rows: slice) -> Any:
        import pyarrow

        return pyarrow.Table.from_pandas(self.frame[rows])


def test_a_hugging_face_dataset_and_a_mapping_are_tables() -> None:
    frame = patients()
    first = from_table(frame, label="ill", client="ward")
    assert torch.equal(from_table(Hub(frame), label="ill", client="ward").x, first.x)
    columns = {name: frame[name].tolist() for name in frame}
    assert torch.equal(from_table(columns, label="ill", client="ward").x, first.x)


def test_kinds_regression_and_a_test_table() -> None:
    frame = patients()
    data = from_table(frame, label="age", features=["blood", "ward"], categories=["ward"], clients=4)
    assert data.shape == (6,)
    ages = from_table(frame.astype({"age": float}), label="age", features=["blood"], clients=4)
    assert ages.kind == "regression"
    apart = from_table(frame[:30], test=frame[30:], label="ill", clients=3)
    assert (len(apart.train), len(apart.test)) == (30, 10)


def test_it_trains() -> None:
    run = lc.fit(
        data=from_table(patients(), label="ill", client="ward"), model="logistic", rounds=1, cohort=2, workers=0
    )
    assert 0 <= run.summary["global_accuracy"] <= 1


def test_torch_datasets_are_read_once() -> None:
    pairs = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.arange(20) % 4)
    data = from_dataset(pairs, clients=4, test=pairs)
    assert (data.num_clients, len(data.train), len(data.test), data.classes) == (4, 20, 20, 4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"label": "il"}, "table has no column 'il'; did you mean 'ill'?"),
        ({"label": "ill", "client": "wards"}, "did you mean 'ward'?"),
        ({"label": "ill", "features": []}, "no columns left to learn from"),
        ({"label": "weight"}, "the label 'weight' is missing in row 0"),
    ],
)
def test_errors_say_what_is_wrong(given: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        from_table(patients(), **{"clients": None if "client" in given else 2, **given})
    assert says in str(caught.value)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a data frame"):
        from_table([1, 2], label="x")
    with pytest.raises(DataError, match="different lengths"):
        from_table({"a": [1], "b": [1, 2]}, label="a")
    with pytest.raises(DataError, match=r"a table is a \.csv"):
        lc.data.tabular(path=str(tmp_path / "x.json"), label="a")
    with pytest.raises(DataError, match="cannot be read"):
        lc.data.tabular(path=str(tmp_path / "x.csv"), label="a")
    with pytest.raises(DataError, match="item 0 must be a pair"):
        from_dataset([1, 2])
