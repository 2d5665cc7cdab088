"""Every code block of README and docs is executed; every TOML block is a valid configuration; commands can be given."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from laconic.cli import app
from laconic.config import experiment_from, read_tables

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "results" / "README.md",
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "toml", "console", "text"}


def blocks(language: str) -> list[object]:
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


def commands(text: str) -> list[list[str]]:
    """The words of every command of a console block, without comments; `\\` at the end of a line goes on."""
    return [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("text", blocks("python"))
def test_python_block_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "<block>", "exec", dont_inherit=True), {"__name__": "block"})


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_block_is_a_configuration(text: str, tmp_path: Path) -> None:
    tomllib.loads(text)
    path = tmp_path / "block.toml"
    path.write_text(text)
    for _, table in read_tables(path):
        experiment_from(table)


@pytest.mark.parametrize("text", blocks("console"))
def test_console_block_can_be_given(text: str) -> None:
    """Commands, options and arguments exist, and so do the files of the repository that they name."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(text):
        while "=" in words[0]:  # VARIABLE=value before a command
            words = words[1:]
        program, *rest = words
        if program == "laconic":
            command = get_command(app).commands[rest[0]]  # type: ignore[attr-defined]
            command.make_context(rest[0], rest[1:])
        elif program == "make":
            assert set(rest) <= targets, words
        elif program in ("python", "sh") and rest[0] == "-m":
            assert (ROOT / f"{rest[1].replace('.', '/')}.py").is_file(), words
        elif program in ("python", "sh"):
            assert (ROOT / rest[0]).is_file(), words
        elif program.endswith(".sh"):  # of the folder that `laconic deploy init` writes
            assert (ROOT / "deploy" / "flower" / Path(program).name).is_file(), words
        else:
            assert program in (".", "pip", "git", "cd", "ray"), f"a command that no test knows: {words}"
        for word in rest:
            if word.split("/")[0] in ("examples", "results") and "." in word.rsplit("/", 1)[-1]:
                assert (ROOT / word).exists(), word


def test_the_tutorial_s_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for kind, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
        for program, *rest in commands(text) if kind == "console" else ():
            if program == "laconic":
                result = CliRunner().invoke(app, rest)
                assert result.exit_code == 0, (rest, result.output)


def test_every_block_names_its_language() -> None:
    for page in PAGES:
        fences = [line for line in page.read_text().splitlines() if line.startswith("```")]
        assert {fence.removeprefix("```") for fence in fences[::2]} <= LANGUAGES, page
        assert set(fences[1::2]) <= {"```"}, page


def test_how_to_write_one_s_own_takes_less_than_forty_lines() -> None:
    found = [text for kind, text in BLOCK.findall((ROOT / "docs" / "extending.md").read_text()) if kind == "python"]
    assert len(found) == 8  # four of methods, an evaluation, two of codecs, a partition
    assert all(len(text.splitlines()) < 40 for text in found)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_method_has_a_page() -> None:
    from laconic.methods import methods

    pages = {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert set(methods) - pages == {"lg_fedsparse"}  # on the page of private leaves
