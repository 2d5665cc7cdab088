"""The page in a file: whole, alone, and deaf to whatever runs are called. (tests/ui looks at it in a browser.)"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import laconic as lc
from laconic.report import page, write_report

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(HTMLParser):
    """Elements, their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "an element is closed in another's place"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style", "title"):
            attributes = next(a for t, a in reversed(self.elements) if t == self.open[-1])
            self.texts[attributes.get("id") or self.open[-1]] = data


def written(runs: list[Path], out: Path) -> tuple[str, Outline, dict[str, Any]]:
    text = write_report(runs, out).read_text(encoding="utf-8")
    outline = Outline(text)
    return text, outline, json.loads(outline.texts["data"])


def test_one_file_that_asks_nobody_for_anything(made: Path, tmp_path: Path) -> None:
    text, outline, data = written([made], tmp_path / "report.html")
    assert outline.open == []
    assert [tag for tag, _ in outline.elements if tag in ("script", "style")] == ["style", "script", "script"]
    for tag, attributes in outline.elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:").startswith("data:"), tag  # type: ignore[union-attr]
    outside = [url for url in re.findall(r"https?://[^\s\"')]+", text) if not url.startswith("http://www.w3.org/")]
    assert outside == []
    assert "@import" not in text
    assert "url(" not in outline.texts["style"]
    assert len(data["runs"]) == 6
    assert len(text) < 250_000


def test_only_the_pages_own_script_may_run(made: Path, tmp_path: Path) -> None:
    _, outline, _ = written([made], tmp_path / "report.html")
    policy = next(a["content"] for t, a in outline.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for part in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(outline.texts[part].encode()).digest()).decode()
        assert rules[f"{part}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    assert "connect-src 'self'" in page(None)


HOSTILE = ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "<!--", "a&b'c$title", "naïve  ☃"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_and_nothing_else(runs: Path, tmp_path: Path, name: str) -> None:
    # A folder cannot have a slash in its name; a setting can have anything.
    folder = (runs / "fedavg-0").rename(runs / name.replace("/", "∕"))
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('name = "mlp"', f"name = {json.dumps(name)}"))
    plain, _, _ = written([runs / "fedavg-1"], tmp_path / "plain.html")
    text, outline, data = written([folder], tmp_path / "report.html")
    assert data["runs"][0]["name"] == folder.name
    assert data["runs"][0]["model"] == name
    assert [t for t, _ in outline.elements] == [t for t, _ in Outline(plain).elements]
    assert text.count("<script") == 2
    assert text.count("</script") == 2


def test_a_hostile_title_is_escaped(runs: Path, tmp_path: Path) -> None:
    config = runs / "fedavg-0" / "config.toml"
    config.write_text(config.read_text().replace('source = "digits"', 'source = "</title><script>x"'))
    _, outline, data = written([runs / "fedavg-0"], tmp_path / "report.html")
    assert outline.texts["title"] == data["title"] == "fedavg on </title><script>x"


def test_runs_named_twice_are_shown_once(made: Path, tmp_path: Path) -> None:
    _, _, data = written([made / "eden-0", made, made / "eden-0" / ".." / "eden-0"], tmp_path / "report.html")
    assert len(data["runs"]) == 6


def test_mistakes_are_answered_with_a_sentence(made: Path, tmp_path: Path) -> None:
    with pytest.raises(lc.ConfigError, match=r"^a report is about runs"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(lc.DataError, match=r"nowhere holds no run: it has no config.toml"):
        write_report([made, tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(lc.ConfigError, match=r"is a folder; name the file"):
        write_report([made], tmp_path)
    with pytest.raises(lc.RunError, match=r"^cannot write .*report.html"):
        write_report([made], tmp_path / "no" / "folder" / "report.html")
    assert list(tmp_path.iterdir()) == []


def laconic(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from laconic.cli import main; main()", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_command(runs: Path, tmp_path: Path) -> None:
    said = laconic("report", "runs", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert re.fullmatch(r"runs/report\.html \(\d+(\.\d+)? kB\)\n", said.stdout)
    assert (runs / "report.html").stat().st_size > 50_000
    said = laconic("report", "runs/eden-0", "runs/fedavg-0", cwd=tmp_path)
    assert said.stdout.startswith("report.html (")
    said = laconic("report", "runs/eden-9", cwd=tmp_path)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == "error: runs/eden-9 holds no run: it has no config.toml.\n"
