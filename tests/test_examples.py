"""Every example runs."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest

from laconic.config import experiment_from, read_tables
from laconic.data.fetch import PACKAGES
from laconic.methods import methods

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    quick = {"rounds": 5, "seeds": 1}
    main(**{key: quick[key] for key in inspect.signature(main).parameters if key in quick})
    assert capsys.readouterr().out.count("\n") > 2


def test_every_method_has_an_example() -> None:
    texts = "\n".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    assert not [name for name in methods if f"lc.{name}(" not in texts]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_listed(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60 or path.name == "demo.py"
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_configuration(name: str) -> None:
    for _, table in read_tables(EXAMPLES / name):
        if table["data"]["source"] in PACKAGES and not PACKAGES[table["data"]["source"]].path.is_file():
            pytest.skip(f"no laconic data get {table['data']['source']} yet")
        experiment_from(table)
