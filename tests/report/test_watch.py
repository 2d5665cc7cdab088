"""The live page's server: what it shows, and what it shows to nobody."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import laconic as lc
from laconic.engine import RunDirectory
from laconic.report import WatchServer


@contextmanager
def serving(folder: Path) -> Iterator[WatchServer]:
    with WatchServer(folder, port=0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: WatchServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)) as connection:
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


def shown(server: WatchServer) -> dict[str, Any]:
    status, _, body = ask(server, "/runs.json")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


def test_the_page_and_its_data(made: Path) -> None:
    with serving(made) as server:
        status, headers, body = ask(server, "/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert b" data-live>" in body
        assert len(shown(server)["runs"]) == 6
        assert ask(server, "/?x=1")[0] == 200
        assert headers["cache-control"] == "no-store"
        assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")
        status, headers, body = ask(server, "/runs.json", method="HEAD")
        assert (status, body, int(headers["content-length"]) > 1000) == (200, b"", True)


def test_what_has_not_changed_is_not_sent_again(runs: Path) -> None:
    with serving(runs) as server:
        _, headers, _ = ask(server, "/runs.json")
        tag = headers["etag"]
        status, _, body = ask(server, "/runs.json", If_None_Match=tag)
        assert (status, body) == (304, b"")
        with (runs / "eden-0" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"round": 7, "bytes_up": 1, "bytes_down": 1, "seconds": 0.0}) + "\n")
        status, headers, body = ask(server, "/runs.json", If_None_Match=tag)
        assert status == 200
        assert headers["etag"] != tag
        assert max(run["round"] for run in json.loads(body)["runs"]) == 7


def test_states(runs: Path, tmp_path: Path) -> None:
    for name in ("eden-0", "eden-1"):
        (runs / name / "summary.json").unlink()
    with serving(runs) as server, holding(runs / "eden-1"):
        states = {run["name"]: run["state"] for run in shown(server)["runs"]}
    assert states == {
        **{"eden-0": "interrupted", "eden-1": "running", "fedavg-0": "finished", "fedavg-1": "finished"},
        **{"fedsparse-0": "finished", "fedsparse-1": "finished"},
    }


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Another process that is at a run."""
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(folder / ".lock")], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"held\n"
        yield
        process.stdin.close()


def test_runs_come_and_go(tmp_path: Path, made: Path) -> None:
    with serving(tmp_path) as server:
        assert shown(server)["runs"] == []
        assert shown(server)["title"] == "No runs yet"
        (tmp_path / "one").mkdir()
        for name in ("config.toml", "metrics.jsonl"):
            (tmp_path / "one" / name).write_bytes((made / "eden-0" / name).read_bytes())
        (found,) = shown(server)["runs"]
        assert (found["name"], found["state"]) == ("one", "interrupted")
        (tmp_path / "one" / "config.toml").unlink()
        assert shown(server)["runs"] == []


def test_a_damaged_run_does_not_hide_the_others(runs: Path) -> None:
    (runs / "eden-0" / "config.toml").write_text("[")
    (runs / "eden-1" / "metrics.jsonl").write_text("[]\n")
    (runs / "fedavg-0" / "metrics.jsonl").write_text('{"round": 1}\n')
    (runs / "fedavg-1" / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    with serving(runs) as server:
        data = shown(server)
    assert [run["name"] for run in data["runs"]] == ["fedsparse-0", "fedsparse-1"]
    assert [each["name"] for each in data["unreadable"]] == ["eden-0", "eden-1", "fedavg-0", "fedavg-1"]
    assert all(each["reason"] for each in data["unreadable"])


# --- nothing outside the folder, nobody outside the machine ------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/..", "/../secret", "/../../etc/passwd", "//etc/passwd", "/%2e%2e/secret", "/..%2fsecret", "/..\\secret"),
        *("/eden-0/config.toml", "/config.toml", "/runs.json/../secret", "/runs.json%00", "/./runs.json", "secret"),
        *("http://127.0.0.1/runs.json", "/\x7f", "/" + "a" * 5000, "/.lock", "/index.html", "/favicon.ico"),
    ],
)
def test_no_path_leads_to_a_file(made: Path, path: str) -> None:
    with serving(made) as server:
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nConnection: close\r\n\r\n"
        answer = raw(server, request.encode("latin-1"))
    assert answer.split(b" ")[1] in (b"404", b"400", b"414")
    assert answer.endswith((b"There is nothing here.\n", b"\r\n\r\n", b"</html>\n"))
    assert b"[run]" not in answer


def raw(server: WatchServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "0.0.0.0:{port}"]
)
def test_only_its_own_name_is_answered(made: Path, host: str) -> None:
    with serving(made) as server:
        for path in ("/", "/runs.json"):
            status, _, body = ask(server, path, Host=host.format(port=server.server_port))
            assert status == 403
            assert b"eden" not in body
        assert ask(server, "/", Host=f"localhost:{server.server_port}")[0] == 200
        answer = raw(server, b"GET /runs.json HTTP/1.0\r\n\r\n")  # no Host at all
        assert answer.split(b" ")[1] == b"403"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading(made: Path, method: str) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in made.rglob("*"))
    with serving(made) as server:
        assert ask(server, "/runs.json", method=method)[0] == 501
        shown(server)
    assert sorted((path, path.stat().st_mtime_ns) for path in made.rglob("*")) == before


def test_it_listens_on_this_machine_alone(made: Path) -> None:
    with serving(made) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_links_are_not_followed(runs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (runs / "eden-0").rename(outside)
    (runs / "eden-0").symlink_to(outside)
    secret = tmp_path / "secret"
    secret.write_text('{"round": 1, "secret": 1}\n')
    for name, file in (("eden-1", "metrics.jsonl"), ("fedavg-0", "summary.json"), ("fedavg-1", "split.json")):
        (runs / name / file).unlink()
        (runs / name / file).symlink_to(secret)
    (runs / "fedsparse-0" / "config.toml").unlink()
    (runs / "fedsparse-0" / "config.toml").symlink_to(outside / "config.toml")
    with serving(runs) as server:
        data = shown(server)
        assert b"secret" not in ask(server, "/runs.json")[2]
    assert [run["name"] for run in data["runs"]] == ["fedsparse-1"]
    assert [each["reason"].split(" is ")[0] for each in data["unreadable"]] == [
        *("metrics.jsonl", "summary.json", "split.json", "config.toml")
    ]


def test_odd_names_and_odd_files(runs: Path) -> None:
    names = ["-rf", "..hidden", "a b", "</script>".replace("/", "∕"), "ünï", "%2e%2e"]
    for old, new in zip(["eden-0", "eden-1", "fedavg-0", "fedavg-1", "fedsparse-0", "fedsparse-1"], names, strict=True):
        (runs / old).rename(runs / new)
    (runs / "-rf" / "metrics.jsonl").unlink()
    os.mkfifo(runs / "-rf" / "metrics.jsonl")  # reading it would wait for ever
    (runs / "a b" / ".lock").unlink()
    os.mkfifo(runs / "a b" / ".lock")
    (runs / "folder" / "config.toml").mkdir(parents=True)
    (runs / "file").write_text("")
    with serving(runs) as server:
        data = shown(server)
    assert sorted(run["name"] for run in data["runs"]) == sorted(names)
    assert next(run for run in data["runs"] if run["name"] == "-rf")["round"] == 0
    assert [each["name"] for each in data["unreadable"]] == ["folder"]


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs") as server:
        (tmp_path / "runs").rmdir()
        assert shown(server)["runs"] == []
    with pytest.raises(lc.DataError, match=r"runs is no folder; name the one that holds the runs"):
        WatchServer(tmp_path / "runs", port=0)


# --- the command -------------------------------------------------------------------------------------------------

LACONIC = [sys.executable, "-c", "from laconic.cli import main; main()"]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it(made: Path, ending: signal.Signals) -> None:
    command = [*LACONIC, "watch", str(made), "--port", "0"]
    # Ctrl-C is heard even where the tests themselves run in the background of a shell, which ignores it.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=heard) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith(f"{made}: http://127.0.0.1:")
        process.send_signal(ending)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (0, "")


def test_a_busy_port_is_one_sentence(made: Path) -> None:
    with WatchServer(made, port=0) as server:
        with pytest.raises(lc.RunError, match=r"address already in use; choose another with --port"):
            WatchServer(made, port=server.server_port)
        command = [*LACONIC, "watch", str(made), "--port", str(server.server_port)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == (
        f"error: cannot serve at 127.0.0.1:{server.server_port}: address already in use; choose another with --port.\n"
    )


def test_a_port_that_cannot_be(made: Path) -> None:
    with pytest.raises(lc.RunError, match=r"^cannot serve at 127\.0\.0\.1:70000"):
        WatchServer(made, port=70000)


def test_a_watch_in_the_process_of_a_run_leaves_its_lock_alone(runs: Path) -> None:
    directory = RunDirectory(runs, "eden-0")
    config = {"run": {"name": "eden-0"}}
    directory.open(config, resume=False, overwrite=True)
    try:
        with serving(runs) as server:
            (state,) = {run["state"] for run in shown(server)["runs"] if run["name"] == "eden-0"}
            assert state == "running"
        other = (
            "import sys; from pathlib import Path; from laconic.engine import RunDirectory; "
            "RunDirectory(Path(sys.argv[1]), 'eden-0').open({}, resume=True)"
        )
        said = subprocess.run([sys.executable, "-c", other, str(runs)], capture_output=True, text=True, timeout=120)
        assert "is in use by another process" in said.stderr
    finally:
        directory.close()
