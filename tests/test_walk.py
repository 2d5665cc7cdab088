"""The walk for newcomers in docs/architecture.md leads along functions that exist, each called by the row it names."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import laconic
from laconic.cli import app
from laconic.config import experiment_from, read_table
from laconic.flower import serve
from laconic.flower.node import answer_values
from laconic.flower.nodes import TransportReply

ROOT = Path(__file__).parent.parent
SOURCE = Path(laconic.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST = 20


class Hop(NamedTuple):
    """A row of a walk."""

    number: int
    file: str
    function: str
    caller: int | None


def walks() -> dict[str, list[Hop]]:
    """The tables of the walk, by heading."""
    section = PAGE.split("\n## A walk for newcomers\n")[1].split("\n## ")[0]
    found: dict[str, list[Hop]] = {}
    for part in section.split("\n### ")[1:]:
        heading, _, body = part.partition("\n")
        rows = [
            [cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in body.splitlines() if "|" in line
        ]
        found[heading] = [
            Hop(int(number), file, function, int(caller) if caller else None)
            for number, file, function, caller, _ in rows[2:]
        ]
    return found


WALKS = walks()


def source_of(hop: Hop) -> str:
    """The text of the function that a row names."""
    path = (SOURCE / hop.file).resolve()
    assert path.is_file(), f"row {hop.number}: there is no {hop.file}"
    text = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in hop.function.split("."):
        inside = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        node = next((n for n in inside if n.name == name), node)
        assert getattr(node, "name", None) == name, f"row {hop.number}: {hop.file} has no {hop.function}"
    return ast.get_source_segment(text, node) or ""


class Nodes:
    """A transport whose nodes are here: each message is answered when it is sent."""

    def __init__(self, config: Path, clients: int) -> None:
        self._config, self._clients = config, clients
        self._states: dict[int, dict[str, bytes]] = {node: {} for node in range(clients)}
        self._replies: list[TransportReply] = []
        self._sent = 0

    def nodes(self) -> Iterable[int]:
        return range(self._clients)

    def push(self, node: int, values: Mapping[str, Any], *, kind: str, round: int, seconds: float) -> str | None:
        self._sent += 1
        reply = answer_values(self._config, {"partition-id": node}, values, self._states[node])
        self._replies.append(TransportReply(str(self._sent), node, reply))
        return str(self._sent)

    def pull(self, names: Iterable[str]) -> Iterable[TransportReply]:
        replies, self._replies = self._replies, []
        return replies


def walked(hops: list[Hop], action: Callable[[], object]) -> list[int]:
    """The rows whose functions are called meanwhile, in the order of the calls."""
    rows = {(str((SOURCE / hop.file).resolve()), hop.function): hop.number for hop in hops}
    calls: list[int] = []

    def note(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename, code.co_qualname) in rows:
            calls.append(rows[code.co_filename, code.co_qualname])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


def test_there_is_a_walk_through_a_simulation_and_one_through_a_deployment() -> None:
    assert len(WALKS) == 2


@pytest.mark.parametrize("heading", WALKS)
def test_the_walk_is_short(heading: str) -> None:
    hops = WALKS[heading]
    assert 1 < len(hops) <= MOST
    assert [hop.number for hop in hops] == list(range(1, len(hops) + 1))


@pytest.mark.parametrize("heading", WALKS)
def test_every_function_exists_and_is_named_where_it_is_called_from(heading: str) -> None:
    sources = {hop.number: source_of(hop) for hop in WALKS[heading]}
    for hop in WALKS[heading]:
        if hop.caller is not None:
            assert hop.caller < hop.number, f"row {hop.number} is called from a later row"
            words = set(re.findall(r"\w+", sources[hop.caller]))
            assert words & set(hop.function.split(".")), f"row {hop.caller} says nothing of {hop.function}"


def test_a_run_takes_the_walk(tmp_path: Path) -> None:
    hops = next(hops for heading, hops in WALKS.items() if "laconic run" in heading)
    words = ["run", str(ROOT / "examples" / "digits.toml"), "--workers", "0", "--set", "run.rounds=1"]
    calls = walked(hops, lambda: CliRunner().invoke(app, [*words, "--out", str(tmp_path)]))
    assert list(dict.fromkeys(calls)) == [hop.number for hop in hops]


def test_a_deployment_takes_the_walk(tmp_path: Path) -> None:
    """But for what is Flower's own: its apps, its grid and the process that stays."""
    hops = next(hops for heading, hops in WALKS.items() if "flwr run" in heading)
    config = tmp_path / "run.toml"
    config.write_text('[run]\nrounds = 1\ncohort = 2\n[data]\nsource = "digits"\nclients = 2\n')
    run = experiment_from(read_table(config))
    calls = iter(walked(hops, lambda: serve(Nodes(config, 2), run, out=tmp_path)))
    flowers = {"server_app", "experiment_from", "GridTransport.push", "client_app", "_serve"}
    missing = [hop.function for hop in hops if hop.function not in flowers and hop.number not in calls]
    assert missing == []  # each is called after the one before it: `in` goes on where it stopped


def test_every_law_of_the_checks_is_one_of_the_page() -> None:
    laws = PAGE.split("\n## Laws\n")[1].split("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d)\. ", laws, re.MULTILINE)]
    assert numbers == list(range(1, 9))
    checked = re.findall(r"^(\d)\. ", (SOURCE / "testing.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(number) for number in checked} <= set(numbers)
