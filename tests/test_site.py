"""The documentation site builds without a warning and asks nothing of the network. Needs the extra `docs`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra docs is not installed: make docs")
pytest.importorskip("mkdocstrings", reason="the extra docs is not installed: make docs")

ROOT = Path(__file__).parent.parent
LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]+src=[\"']?(https?:)?//|<link[^>]+href=[\"']?(https?:)?//", re.IGNORECASE
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    made = subprocess.run(words, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert [
        page for page in [Path("index.html"), Path("results/index.html"), *pages] if not (site / page).is_file()
    ] == []


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert [page.name for page in pages if LOADED.search(page.read_text(encoding="utf-8"))] == []
