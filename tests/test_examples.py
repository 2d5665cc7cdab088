"""Every example runs."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest

from laconic.config import experiment_from, read_table
from laconic.methods import methods

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    main(**{"rounds": 5} if "rounds" in inspect.signature(main).parameters else {})
    assert capsys.readouterr().out.count("\n") > 2


def test_every_method_has_an_example() -> None:
    texts = "\n".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    assert not [name for name in methods if f"lc.{name}(" not in texts]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_listed(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_configuration(name: str) -> None:
    experiment_from(read_table(EXAMPLES / name))
