from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.core import ConfigError, find_object


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "own_nets.py").write_text(
        "class Outer:\n    class Inner:\n        pass\n\nnumber = 3\n\ndef make():\n    return 'made'\n"
    )
    (tmp_path / "own_broken.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "own_exit.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "own_empty.py").write_text("")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def test_finds_functions_and_nested_classes(folder: Path) -> None:
    assert find_object("own_nets:make", what="model", folder=folder)() == "made"
    assert find_object("own_nets:Outer.Inner", what="model", folder=folder).__qualname__ == "Outer.Inner"
    assert find_object("os.path:join", what="model")("a", "b") == str(Path("a") / "b")


def test_looks_in_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert find_object("own_nets:make", what="model")() == "made"


def test_leaves_sys_path_as_it_was(folder: Path) -> None:
    before = list(sys.path)
    find_object("own_nets:make", what="model", folder=folder)
    with pytest.raises(ConfigError):
        find_object("own_broken:x", what="model", folder=folder)
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own_nets", "'own_nets' must have the form \"module.path:Name\""),
        (":make", "must have the form"),
        ("own_nets:", "must have the form"),
        ("", "must have the form"),
        ("own_nets:mak", "'own_nets' has no 'mak'; did you mean 'make'?"),
        ("own_nets:Outer.Iner", "has no 'Outer.Iner'; did you mean 'Inner'?"),
        ("own_empty:x", "has no 'x'; it is empty."),
        ("own_nets:number", "must be something that can be called, got int"),
        ("own_missing:x", "cannot import 'own_missing' (No module named 'own_missing')"),
        ("own_broken:x", "cannot import 'own_broken' (No module named 'a_module_that_is_not_there')"),
        ("own_exit:x", "cannot import 'own_exit' (3)"),
    ],
)
def test_refusals_say_what_is_wrong(folder: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_object(text, what="model.loss", folder=folder)
    assert str(caught.value).startswith(f"model.loss {text!r}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
