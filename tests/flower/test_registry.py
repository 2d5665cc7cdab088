"""Identity: a table of clients and nodes, written when keys are registered, which nothing that a node says changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.flower.conftest import Village, table_for

from laconic.config import experiment_from
from laconic.core import ConfigError, RunError
from laconic.engine import Record, Silent
from laconic.flower.messages import Answer, Call, Envelope
from laconic.flower.nodes import TransportReply
from laconic.flower.registry import register, registered

REGISTERED = {client: 100 + client for client in range(3)}
STRANGER = 1


@dataclass
class Invaded(Village):
    """A village with one more node, which says that it is client 1, and that client 1 has lost its state."""

    first: bool = True
    asked: list[Call] = field(default_factory=list)

    def nodes(self) -> Iterable[int]:
        here = list(super().nodes())
        return [STRANGER, *here] if self.first else [*here, STRANGER]

    def pull(self, names: Iterable[str]) -> Iterable[TransportReply]:
        for name in list(names):
            node, values = self.outbox.get(name, (0, {}))
            if node == STRANGER:
                del self.outbox[name]
                call = Envelope.of(values).open(Call)
                self.asked.append(call)
                lie = (
                    Answer(kind="here", client=1)
                    if call.kind == "hello"
                    else Answer(kind="failed", reason="state_lost")
                )
                yield TransportReply(name, node, Envelope.around(lie)._asdict())
            else:
                yield from super().pull([name])


@pytest.mark.parametrize("first", [True, False])
def test_a_node_cannot_squat_a_client_nor_evict_it(first: bool) -> None:
    table = table_for("lg_fedavg", rounds=3)
    village = Invaded(table, 3, first=first)
    run = village.run(registered=REGISTERED)
    assert village.asked == []
    assert run.summary["rejected"] == 0
    assert run.summary["state_sha256"] == experiment_from(table).run().summary["state_sha256"]


def test_without_a_table_it_can() -> None:
    """The control: who came first is asked."""
    village = Invaded(table_for("fedavg", rounds=1), 3)
    (record,) = village.run(deadline=3.0).history
    assert [(r["client"], r["reason"]) for r in record["rejections"]] == [(1, "state_lost")]


def test_a_node_cannot_answer_for_another_client() -> None:
    """Client 2's node gives itself out for client 1's, in words, and in the frame."""
    table = table_for("fedavg", rounds=1)
    stolen: dict[int, Envelope] = {}

    def thief(client: int, call: Call, answer: Envelope) -> Envelope:
        stolen[client] = answer
        return stolen[1] if client == 2 else answer

    (record,) = Village(table, 3, thief).run(registered=REGISTERED).history
    assert [(r["client"], r["reason"]) for r in record["rejections"]] == [(2, "client")]
    (record,) = Village(table, 3).run(registered={0: 100, 1: 102, 2: 101}).history  # a table that is wrong
    assert [(r["client"], r["reason"]) for r in record["rejections"]] == [(1, "client"), (2, "client")]


def test_state_lost_concerns_the_client_that_says_it_alone() -> None:
    table = table_for("lg_fedavg", rounds=3)

    def liar(client: int, call: Call, answer: Envelope) -> Envelope:
        lie = Answer(kind="failed", client=1, reason="state_lost")
        return Envelope.around(lie) if client == 2 and call.kind == "train" else answer

    history = Village(table, 3, liar).run(registered=REGISTERED).history
    for record in history:
        assert [(r["client"], r["reason"]) for r in record["rejections"]] == [(2, "state_lost")]


def test_a_client_moves_to_a_new_node_and_starts_afresh_there(tmp_path: Path) -> None:
    table = table_for("lg_fedavg", rounds=5)

    class Interrupted(Silent):
        def advanced(self, record: Record) -> None:
            if record.round == 3:
                raise RuntimeError("killed")

    before = Village(table, 3)
    with pytest.raises(RuntimeError, match="killed"):
        before.run(out=tmp_path, observer=Interrupted(), registered=REGISTERED)
    kept = {client: before.entries[client] for client in (0, 2)}
    history = Village(table, 3, entries=kept).run(out=tmp_path, resume=True, registered=REGISTERED).history
    reasons = [[(r["client"], r["reason"]) for r in record.get("rejections", ())] for record in history[-3:]]
    assert reasons in ([[(1, "state_lost")], [], []], [[], [(1, "state_lost")], []])


def test_a_node_that_was_refused_is_asked_again_when_its_client_is_free() -> None:
    """Without a table: a second node for client 1 waits, and takes over when the first is gone."""
    table = table_for("fedavg", rounds=3)

    class Two(Village):
        def nodes(self) -> Iterable[int]:
            gone = any(call.round == 1 for call in self.calls)
            return [100, 102, *([] if gone else [101]), 201]

        def pull(self, names: Iterable[str]) -> Iterable[TransportReply]:
            for name in list(names):
                if name in self.outbox and self.outbox[name][0] == 201:
                    self.outbox[name] = (101, self.outbox[name][1])
                    yield from (reply._replace(node=201) for reply in super().pull([name]))
                else:
                    yield from super().pull([name])

    history = Two(table, 3).run(deadline=10.0).history
    assert history[-1]["replies"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[clients.0]\nnode = 'x'\n", "is no table of nodes"),
        ("clients = 3\n", "is no table of nodes"),
        ("[clients.a]\nnode = '1'\n", "is no table of nodes"),
        ("[clients.0]\nnode = '1'\n[clients.1]\nnode = '1'\n", "two clients have the same node"),
    ],
)
def test_a_table_that_cannot_be_one_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "nodes.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        registered(tmp_path)


def test_a_table_with_too_many_clients_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a client 7, but there are 3"):
        Village(table_for("fedavg", rounds=1), 3).run(registered={**REGISTERED, 7: 9})


def test_registration_writes_the_table(tmp_path: Path) -> None:
    assert registered(tmp_path) is None
    with pytest.raises(ConfigError, match=r"holds no node-N\.pub"):
        register(tmp_path)
    certs = tmp_path / "certs"
    certs.mkdir()
    for client in range(3):
        (certs / f"node-{client}.pub").write_text(f"key {client}")
    given: dict[Path, int] = {}

    def superlink(key: Path) -> int:
        if key in given:
            raise RunError("the key is registered already")
        given[key] = 2**63 + len(given)
        return given[key]

    assert register(tmp_path, using=superlink) == {client: 2**63 + client for client in range(3)}
    assert register(tmp_path, using=superlink) == {
        client: 2**63 + client for client in range(3)
    }  # once more: as it was
    new = tmp_path / "new.pub"
    new.write_text("another key")
    assert register(tmp_path, {1: new}, using=superlink)[1] == 2**63 + 3
    new.write_text("a third key, that the SuperLink will not take")
    with pytest.raises(RunError, match="registered already"):
        register(tmp_path, {1: new}, using=superlink)
    assert registered(tmp_path) == {0: 2**63, 1: 2**63 + 3, 2: 2**63 + 2}


def test_the_commands_options_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from laconic.cli import app

    result = CliRunner().invoke(app, ["deploy", "register", str(tmp_path), "--client", "1"])
    assert isinstance(result.exception, ConfigError)
    monkeypatch.setenv("PATH", "")
    key = tmp_path / "k.pub"
    key.write_text("key")
    result = CliRunner().invoke(app, ["deploy", "register", str(tmp_path), "--client", "1", "--key", str(key)])
    assert "no command flwr" in str(result.exception)
