"""The folder of an app, its certificates, and what the doctor says of them."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path

import pytest

from laconic.core import ConfigError, RunError
from laconic.flower.certs import make_certs
from laconic.flower.doctor import examine
from laconic.flower.folder import make_folder

ROOT = Path(__file__).parents[2]


def test_a_folder_has_all_that_is_needed(config: Path, tmp_path: Path) -> None:
    made = {
        path.name: path.read_text() for path in make_folder(tmp_path / "app", config, address="fl.example.org:9000")
    }
    assert set(made) == {
        *("pyproject.toml", ".gitignore", "laconic_server.py", "laconic_client.py", "run.toml", "env.sh"),
        *("superlink.sh", "supernode.sh", "register.sh", "submit.sh"),
    }
    assert "--enable-supernode-auth" in made["superlink.sh"]
    assert not any("--insecure" in text for text in made.values())
    with pytest.raises(RunError, match="already holds an app"):
        make_folder(tmp_path / "app", config)


def test_insecure_must_be_asked_for_and_warns(config: Path, tmp_path: Path) -> None:
    made = {path.name: path.read_text() for path in make_folder(tmp_path / "app", config, insecure=True)}
    assert "WARNING" in made["superlink.sh"]
    assert "WARNING" in made["supernode.sh"]
    assert "register.sh" not in made


def test_mistakes_leave_nothing_behind(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        make_folder(tmp_path / "app", config, address="nowhere")
    config.write_text("[run]\nrouds = 3\n")
    with pytest.raises(ConfigError, match="rouds"):
        make_folder(tmp_path / "app", config)
    assert not (tmp_path / "app").exists()


def test_the_ready_folder_is_what_init_writes(tmp_path: Path) -> None:
    """`laconic deploy init deploy/flower --config examples/deploy.toml`"""
    ready = ROOT / "deploy" / "flower"
    for path in make_folder(tmp_path / "app", ROOT / "examples" / "deploy.toml"):
        assert (ready / path.name).read_text() == path.read_text(), f"{path.name} is out of date"


def test_the_doctor_reads_certificates(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs the extra flower")
    app = tmp_path / "app"
    make_folder(app, config)
    made = make_certs(app / "certs", hosts=["127.0.0.1", "fl.example.org"], nodes=2)
    assert all(path.stat().st_mode & 0o077 == 0 for path in made if path.suffix == ".key")
    found = {finding.what: finding for finding in examine(app, ports=())}
    assert found["trust"].good
    assert "fl.example.org" in found["server.pem"].detail
    assert found["run.toml"].good
    (app / "certs" / "node-0.key").chmod(0o644)
    make_certs(tmp_path / "other", hosts=["127.0.0.1"], nodes=1)
    (tmp_path / "other" / "ca.crt").replace(app / "certs" / "ca.crt")
    (app / "run.toml").write_text("[run]\nrouds = 3\n")
    found = {finding.what: finding for finding in examine(app, ports=())}
    assert found["trust"].good is False
    assert found["node-0.key"].good is False
    assert "rouds" in found["run.toml"].detail
    with pytest.raises(RunError, match="already holds keys"):
        make_certs(app / "certs", hosts=["127.0.0.1"], nodes=1)


def test_the_doctor_sees_an_expired_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="needs the extra flower")
    from laconic.flower import doctor

    make_certs(tmp_path / "certs", hosts=["127.0.0.1"], nodes=1, days=10)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.fromtimestamp(0, tz).replace(year=2100)

    monkeypatch.setattr(doctor.datetime, "datetime", Later)
    found = {finding.what: finding for finding in doctor.examine(tmp_path, ports=())}
    assert found["ca.crt"].good is False
    assert "expired" in found["ca.crt"].detail


def test_the_doctor_knows_what_every_extra_brings() -> None:
    """Those for users: development's own (tests, site, browser) are made by `make`."""
    from laconic.flower.doctor import EXTRAS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name in EXTRAS}
    assert project["optional-dependencies"].keys() - extras.keys() == {"dev", "docs", "ui"}
    called = {"PIL": "pillow", "ray": "flwr[simulation]"}
    for name, modules in EXTRAS.items():
        wanted = {requirement.partition(">")[0] for requirement in extras[name]}
        assert all({called.get(m, m), m.replace("_", "-"), f"{m}[simulation]"} & wanted for m in modules), name


def test_the_doctor_sees_a_port_in_use() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (port,) = (f for f in examine(ports=(taken.getsockname()[1],)) if f.what.startswith("port"))
        assert port.good is False
