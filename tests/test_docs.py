"""Every code block of README and docs is executed; every TOML block is a valid configuration."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from laconic.config import experiment_from, read_table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[object]:
    return [
        pytest.param(text, id=f"{page.name}-{number}")
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


@pytest.mark.parametrize("text", blocks("python"))
def test_python_block_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "<block>", "exec"), {"__name__": "block"})


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_block_is_a_configuration(text: str, tmp_path: Path) -> None:
    tomllib.loads(text)
    path = tmp_path / "block.toml"
    path.write_text(text)
    experiment_from(read_table(path))


def test_every_block_names_its_language() -> None:
    for page in PAGES:
        fences = [line for line in page.read_text().splitlines() if line.startswith("```")]
        assert all(fence != "```" for fence in fences[::2]), page


def test_console_blocks_use_commands_that_exist() -> None:
    from typer.main import get_command

    from laconic.cli import app

    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for kind, text in BLOCK.findall(page.read_text()):
            if kind != "console":
                continue
            for program, word in re.findall(r"^(laconic|make) (\S+)", text, re.MULTILINE):
                assert word in (commands if program == "laconic" else targets), f"{page.name}: {program} {word}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
