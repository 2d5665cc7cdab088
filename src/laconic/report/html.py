"""The page: one HTML file with its style, its script and its data inside; it asks nobody for anything."""

from __future__ import annotations

import base64
import html
import json
import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from string import Template

from laconic.core import ConfigError, DataError
from laconic.engine.files import write_atomically
from laconic.report.describe import Described, describe, describe_run
from laconic.report.records import find_runs, read_run

log = logging.getLogger("laconic")


def write_report(runs: Sequence[Path], out: Path, *, entries: Mapping[Path, str] | None = None) -> Path:
    """Write the report of some runs, named by their folders or by folders that hold them; gives where it stands.

    One that cannot be read is left out with a warning, and named on the page. `entries` are the names that runs have in
    a comparison.
    """
    if not runs:
        raise ConfigError("a report is about runs: name at least one run's folder.")
    folders: dict[Path, Path] = {}
    for named in runs:
        found = find_runs(named)
        if not found:
            read_run(named)  # says what is missing
            raise DataError(f"{named} holds no runs.")
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name the file to write, such as {out / 'report.html'}.")
    named_as = {path.resolve(): name for path, name in (entries or {}).items()}
    described: list[Described] = []
    names: list[str | None] = []
    unreadable: list[dict[str, str]] = []
    for resolved, folder in folders.items():
        try:
            described.append(describe_run(read_run(folder)))
            names.append(named_as.get(resolved))
        except DataError as error:
            unreadable.append({"name": folder.name, "reason": str(error).removeprefix(f"{folder}: ")})
            if len(unreadable) == len(folders):
                raise
            log.warning("left out: %s", error)
    data = describe(described, unreadable=unreadable, entries=names)
    write_atomically(out, page(data).encode())
    return out


def page(data: Described | None) -> str:
    """The page as text, with its data inside; without data, one that asks its server for them again and again.

    Style and script are named by their hashes in the page's policy, so nothing else could run even if it got in.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "base-uri": "'none'",
        "form-action": "'none'",
        **({} if data is not None else {"connect-src": "'self'"}),
    }
    return Template(_asset("page.html")).substitute(
        live="" if data is not None else " data-live",
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        title=html.escape("laconic" if data is None else str(data["title"])),
        style=style,
        script=script,
        data="{}" if data is None else embedded(data),
    )


def embedded(data: Described) -> str:
    """JSON that can stand inside a script element: no text in it can end the element or begin another.

    >>> embedded({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = as_json(data)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def as_json(data: Described) -> str:
    """The data as JSON without blanks."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _asset(name: str) -> str:
    return (files("laconic.report") / "assets" / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    # Of exactly what stands between the tags: the template puts each on lines of its own.
    digest = base64.b64encode(sha256(f"\n{text}\n".encode()).digest()).decode()
    return f"'sha256-{digest}'"
