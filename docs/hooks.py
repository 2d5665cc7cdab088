"""What the site shows from outside docs/: README is its front page, and files that pages link to come along.

Links are written for whoever reads the files in the repository; here they are turned into the site's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\(|src=\")([^)\s#\"]+)")
FRONT = "index.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that the menu does not name stand at the end of its references."""
    named = re.findall(r"[\w/-]+\.md", str(config.nav))
    reference = next(part["Reference"] for part in config.nav or () if "Reference" in part)
    reference += [page.name for page in sorted(DOCS.glob("*.md")) if page.name not in named]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README and CHANGELOG, and, from pages to pages, whatever they link to."""
    waiting = [ROOT / "README.md", *(DOCS / name for name in sorted(files.src_uris) if name.endswith(".md"))]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        if not source.is_relative_to(DOCS):
            files.append(File.generated(config, place(source), abs_src_path=str(source)))
        if source.suffix == ".md":
            for target in linked(source):
                if target not in seen and target.is_file() and target.is_relative_to(ROOT):
                    seen.add(target)
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between docs/ and the rest of the repository, as the site has them."""
    source = Path(page.file.abs_src_path or "")
    here = Path(page.file.src_uri).parent

    def turned(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / link[2]))
        if "://" in link[2] or not target.is_relative_to(ROOT):
            return link[0]
        return link[1] + os.path.relpath(place(target), here)

    return LINK.sub(turned, markdown)


def linked(source: Path) -> list[Path]:
    """The files that a page links to."""
    links = (link for _, link in LINK.findall(source.read_text(encoding="utf-8")) if "://" not in link)
    return [Path(os.path.normpath(source.parent / link)) for link in links]


def place(source: Path) -> str:
    """Where the site has a file of the repository."""
    if source == ROOT / "README.md":
        return FRONT
    return source.relative_to(DOCS if source.is_relative_to(DOCS) else ROOT).as_posix()
