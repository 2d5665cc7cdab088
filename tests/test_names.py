"""The public names: what is imported when it is asked for, and how soon."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import laconic as lc


def said_to_type_checkers() -> set[str]:
    tree = ast.parse(Path(lc.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {alias.name for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_what_type_checkers_see_is_what_there_is() -> None:
    assert said_to_type_checkers() == set(lc.__all__) == set(lc._HOME)


@pytest.mark.parametrize("name", lc.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(lc, name) is not None
    assert name in dir(lc)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'laconic' has no attribute 'fedavgg'"):
        lc.fedavgg  # noqa: B018


@pytest.mark.parametrize("what", ["import laconic", "import laconic.cli"])
def test_torch_is_imported_when_it_is_needed(what: str) -> None:
    code = f"import sys; {what}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_help_takes_less_than_a_second_of_processor_time() -> None:
    code = "import sys, resource, laconic.cli as c\nsys.argv = ['laconic', '--help']\n"
    code += "try:\n    c.main()\nexcept SystemExit:\n    pass\n"
    code += "sys.stderr.write(str(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])))"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr
    assert float(said) < 1.0
