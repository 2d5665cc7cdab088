"""The same TOML on the embedded engine, on Ray and on real machines, and what may go wrong: `make deploy-test`."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.deploy.stack import PATIENCE, Stack, free_port, wait_for
from tests.flower.conftest import METHODS, Table, reference, table_for

from laconic.config import experiment_from

pytestmark = [pytest.mark.slow]
DEADLINE = 25.0


def deployed(name: str, run: str, *, rounds: int, deadline: float = 180.0) -> Table:
    table = table_for(name, rounds=rounds)
    table["run"]["name"] = run
    table["deploy"] = {"deadline": deadline}
    return table


# --- three engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_deployment_ends_in_the_state_of_the_embedded_engine(stack: Stack, name: str) -> None:
    table = deployed(name, f"same-{name}", rounds=2)
    stack.submit(table)
    summary = stack.finished(f"same-{name}")
    embedded = experiment_from(table).run().summary
    same = ("state_sha256", "bytes_up", "bytes_down", "global_accuracy", "local_accuracy", "rejected")
    assert {key: summary[key] for key in same} == {key: embedded[key] for key in same}


@pytest.mark.parametrize("name", METHODS)
def test_ray_ends_in_the_state_of_the_embedded_engine(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra flower")
    from tests.flower.test_ray import on_ray

    table = table_for(name, rounds=2)
    assert on_ray(table, tmp_path)["state_sha256"] == experiment_from(table).run().summary["state_sha256"]


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_dishonest_client_costs_its_own_replies(stack: Stack) -> None:
    table = deployed("fedavg", "dishonest", rounds=5)
    client = stack.app / "laconic_client.py"
    honest = client.read_text()
    shutil.copy(Path(__file__).with_name("faulty_client.py"), client)
    try:
        stack.submit(table)
        summary = stack.finished("dishonest")
    finally:
        client.write_text(honest)
    records = stack.records("dishonest")
    reasons = [[(x["client"], x["reason"]) for x in record.get("rejections", ())] for record in records]
    assert reasons == [[(2, "non_finite")], [(2, "fingerprint")], [(2, "truncated")], [(2, "weight")], []]
    assert summary["state_sha256"] == reference(table, records).summary["state_sha256"]


def test_a_killed_server_resumes_at_a_round(stack: Stack) -> None:
    """Codec states and what clients hold live on the nodes: they are found again as the checkpoint means them."""
    table = deployed("eden", "killed", rounds=5)
    stack.submit(table)
    wait_for("two rounds", lambda: len(stack.records("killed")) >= 2)
    for app in stack.serverapps():
        os.kill(app, signal.SIGKILL)
    wait_for("its end", lambda: not stack.serverapps())
    assert len(stack.records("killed")) < 5
    stack.submit(table)
    summary = stack.finished("killed")
    embedded = experiment_from(table).run().summary
    assert summary["state_sha256"] == embedded["state_sha256"]
    assert summary["rejected"] == 0


def test_the_round_ends_at_its_deadline_with_the_survivors(stack: Stack) -> None:
    table = deployed("fedavg", "deadline", rounds=4, deadline=DEADLINE)
    stack.submit(table)
    wait_for("the first round", lambda: len(stack.records("deadline")) >= 1)
    os.killpg(stack.processes["node-2"].pid, signal.SIGSTOP)
    stack.kill("node-1")
    wait_for("the second round", lambda: len(stack.records("deadline")) >= 2)
    os.killpg(stack.processes["node-2"].pid, signal.SIGCONT)
    summary = stack.finished("deadline")
    records = stack.records("deadline")
    second = records[1]
    assert {x["client"]: x["reason"] for x in second["rejections"]} == {1: "deadline", 2: "deadline"}
    assert second["replies"] == 1
    assert second["seconds"] <= 1.1 * DEADLINE + 2
    assert all(1 in {x["client"] for x in record["rejections"]} for record in records[1:])
    assert records[-1]["replies"] == 2, "the straggler came back, and what it sent late was not counted"
    assert summary["state_sha256"] == reference(table, records).summary["state_sha256"]
    stack.come_back(1)


def test_a_round_without_anybody_is_abandoned(stack: Stack) -> None:
    table = deployed("fedavg", "nobody", rounds=4, deadline=DEADLINE)
    stack.submit(table)
    wait_for("the first round", lambda: len(stack.records("nobody")) >= 1)
    nodes = [stack.processes[f"node-{client}"].pid for client in range(3)]
    try:
        for node in nodes:
            os.killpg(node, signal.SIGSTOP)
        wait_for("the second round", lambda: len(stack.records("nobody")) >= 2)
    finally:
        for node in nodes:
            os.killpg(node, signal.SIGCONT)
    summary = stack.finished("nobody")
    records = stack.records("nobody")
    assert records[1]["abandoned"] == "no reply was accepted"
    assert records[1]["seconds"] <= 1.1 * DEADLINE + 2
    assert records[-1]["replies"] == 3, "all came back"
    assert summary["state_sha256"] == reference(table, records).summary["state_sha256"]


# --- who may take part -----------------------------------------------------------------------------------------------


def stranger(stack: Stack, *arguments: str) -> tuple[int, str]:
    """A SuperNode that should not get in, how it ended, and what it said; it gives up after one try."""
    name = f"stranger-{len(stack.processes)}"
    before = len(stack.log(name))
    process = stack.start(
        name,
        *("flower-supernode", "--superlink", stack.address, "--port", str(free_port()), "--max-retries", "1"),
        *("--node-config", "partition-id=0 num-partitions=3", *arguments),
        FLWR_TELEMETRY_ENABLED="0",
        FLWR_DISABLE_UPDATE_CHECK="1",
    )
    try:
        return process.wait(timeout=PATIENCE), stack.log(name)[before:]
    finally:
        stack.kill(name)


def refused(code: int, said: str, why: str) -> None:
    """With the documented status, and for this reason."""
    assert code != 0, said
    assert "SuperNode ID" not in said, "it was let in"
    assert "Exit Code: 305" in said
    assert why in said


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("unregistered", "Failed to activate SuperNode"),
        ("without a key", "SuperNode authentication is enabled"),
        ("wrong authority", "CERTIFICATE_VERIFY_FAILED"),
        ("plaintext", "Server disconnected without sending a response"),
    ],
)
def test_strangers_are_refused(stack: Stack, who: str, why: str, tmp_path: Path) -> None:
    from laconic.flower.certs import make_certs

    make_certs(tmp_path / "other", hosts=["127.0.0.1"], nodes=1)
    ours, theirs = stack.app / "certs", tmp_path / "other"
    arguments = {
        "unregistered": ("--root-certificates", ours / "ca.crt", "--auth-supernode-private-key", theirs / "node-0.key"),
        "without a key": ("--root-certificates", ours / "ca.crt"),
        "wrong authority": (
            *("--root-certificates", theirs / "ca.crt"),
            *("--auth-supernode-private-key", ours / "node-0.key"),
        ),
        "plaintext": ("--insecure",),
    }[who]
    code, said = stranger(stack, *map(str, arguments))
    refused(code, said, why)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    """By the node: it does not talk to a server whose certificate ended yesterday."""
    from laconic.flower.certs import make_certs

    old = Stack(tmp_path, table_for("fedavg"))
    shutil.rmtree(old.app / "certs")
    certs = old.app / "certs"
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    make_certs(certs, hosts=["127.0.0.1"], nodes=1, days=1, since=before)
    try:
        old.start("superlink", str(old.app / "superlink.sh"))
        wait_for("the SuperLink's port", old.listens)
        key = str(certs / "node-0.key")
        code, said = stranger(old, "--root-certificates", str(certs / "ca.crt"), "--auth-supernode-private-key", key)
    finally:
        left = old.down()
    assert left == []
    refused(code, said, "certificate has expired")


def test_a_payload_of_sixty_megabytes_passes(stack: Stack) -> None:
    table = deployed("fedavg", "large", rounds=1, deadline=500.0)
    table["run"] |= {"cohort": 1, "evaluations": ["global"]}
    table["model"] = {"name": "mlp", "hidden": [210_000]}
    table["method"] |= {"local_steps": 1}
    stack.submit(table)
    summary = stack.finished("large", seconds=600)
    assert summary["bytes_up"] > 60_000_000
    assert summary["bytes_down"] > 60_000_000
    assert summary["state_sha256"] == experiment_from(table).run().summary["state_sha256"]
