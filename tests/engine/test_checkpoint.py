"""Checkpoints: all of the state comes back, and damage is always noticed."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laconic.core import RunError, tree_sha256
from laconic.engine import Checkpoints, ClientStore, Ledger, Score, State, pack
from laconic.engine.downlink import Downlink
from laconic.engine.files import TEMPORARY, write_atomically


def state_at(round: int) -> State:
    """A state with something in every part of it; small, so that every byte of it can be damaged."""
    state = State(
        round,
        {"w/b": torch.tensor([round + 0.5]), "w/a": torch.tensor([1e-5]), "n": torch.tensor(round)},
        local={3: Score(2, {"loss": 1e-7 * round, "accuracy": 1.0})},
        ledger=Ledger(bytes_up=round * 10, bytes_down=7, messages_up=2, messages_down=1, paper_bytes=5),
        downlink=Downlink({"b": torch.ones(1), "a": torch.zeros(1)}, [0, 9, 20], {5: 2, 1: 1}),
    )
    state.personal[4] = pack({"p": torch.tensor([round])})
    state.codec[2] = pack({"e": torch.tensor([0.25])})
    return state


def identity(state: State) -> Any:
    down = state.downlink
    return (
        state.round,
        tree_sha256(state.server),
        list(state.server),
        dict(state.personal),
        dict(state.codec),
        state.local,
        state.ledger,
        None if down is None else (tree_sha256(down.held), list(down.held), down.sent, down.seen),
    )


def checkpoints(folder: Path, *rounds: int) -> Checkpoints:
    folder.mkdir(exist_ok=True)
    made = Checkpoints(folder)
    for number in rounds:
        made.save(state_at(number), {"metrics_bytes": number})
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back(tmp_path: Path) -> None:
    loaded = checkpoints(tmp_path, 8).load()
    assert loaded is not None
    state, notes = loaded
    assert identity(state) == identity(state_at(8))
    assert notes == {"metrics_bytes": 8}
    assert isinstance(state.personal, ClientStore)


def test_an_empty_state_comes_back(tmp_path: Path) -> None:
    made = Checkpoints(tmp_path)
    made.save(State(0, {}), {})
    loaded = made.load()
    assert loaded is not None
    assert identity(loaded[0]) == identity(State(0, {}))


def test_server_leaves_may_share_memory(tmp_path: Path) -> None:
    vector = torch.arange(6.0)
    state = State(1, {"w/a": vector, "best/a": vector, "t": vector.view(2, 3).T})
    made = Checkpoints(tmp_path)
    made.save(state, {})
    loaded = made.load()
    assert loaded is not None
    assert tree_sha256(loaded[0].server) == tree_sha256(state.server)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).load() is None
    (tmp_path / "round-000003.safetensors").write_bytes(b"orphan")
    (tmp_path / "round-x.json").write_bytes(b"not ours")
    (tmp_path / "notes.json").write_bytes(b"not ours")
    assert Checkpoints(tmp_path).load() is None


def test_the_newest_two_and_the_first_are_kept(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, 0)
    kept = []
    for number in (2, 4, 6, 7, 10):
        made.save(state_at(number), {})
        kept.append(sorted(int(path.stem[6:]) for path in tmp_path.glob("*.json")))
    assert kept == [[0, 2], [0, 2, 4], [0, 4, 6], [0, 6, 7], [0, 7, 10]]
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == [
        *("round-000000", "round-000007", "round-000010")
    ]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, 0, 2)
    (tmp_path / f"{TEMPORARY}123-round-000004.json").write_bytes(b"half")
    (tmp_path / "round-000004.safetensors").write_bytes(b"its manifest never came")
    (tmp_path / "mine.txt").write_bytes(b"a user's file")
    loaded = made.load()
    assert loaded is not None
    assert loaded[0].round == 2
    made.save(state_at(6), {})
    assert names(tmp_path) == [
        "mine.txt",
        *(f"round-{number:06d}.{kind}" for number in (0, 2, 6) for kind in ("json", "safetensors")),
    ]


def test_more_than_six_digits_sort_as_numbers(tmp_path: Path) -> None:
    loaded = checkpoints(tmp_path, 999_999, 1_000_000).load()
    assert loaded is not None
    assert loaded[0].round == 1_000_000


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """`damaged(name, data)`: the newest file holds this now; whether the one before was used, with a warning."""
    made = checkpoints(tmp_path / "c", 4, 6)
    caplog.set_level(logging.WARNING, logger="laconic")

    def check(name: str, data: bytes | None) -> bool:
        path = tmp_path / "c" / name
        honest = path.read_bytes()
        if data is None:
            path.unlink()
        else:
            put(path, data)
        caplog.clear()
        loaded = made.load()
        put(path, honest)
        assert loaded is not None
        warned = [record.getMessage() for record in caplog.records]
        if loaded[0].round == 6:
            return False
        assert identity(loaded[0]) == identity(state_at(4))
        assert len(warned) == 1
        assert "round-000006.json is damaged" in warned[0]
        return True

    yield check
    loaded = made.load()
    assert loaded is not None
    assert loaded[0].round == 6, "undamaged, it is used"


def put(path: Path, data: bytes) -> None:
    """In place: a file that is emptied first is flushed when it is closed, which takes time."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(data)
        file.truncate()


@pytest.mark.parametrize("name", ["round-000006.json", "round-000006.safetensors"])
def test_every_truncation_is_noticed(tmp_path: Path, damaged: Any, name: str) -> None:
    data = (tmp_path / "c" / name).read_bytes()
    assert 300 < len(data) < 2000
    assert all(damaged(name, data[:length]) for length in range(len(data)))


@pytest.mark.parametrize("name", ["round-000006.json", "round-000006.safetensors"])
def test_every_flip_of_a_bit_is_noticed(tmp_path: Path, damaged: Any, name: str) -> None:
    data = (tmp_path / "c" / name).read_bytes()
    bits = np.random.default_rng(0).permutation(8 * len(data))[:1100].tolist()
    if name.endswith("json"):  # where a flip changes the text, but not what it means: 1e-05 and 1E-05
        bits += [8 * at + 5 for at, byte in enumerate(data) if byte in b"eE"]
        assert b"e-0" in data
    check_flips(damaged, name, data, bits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["round-000006.json", "round-000006.safetensors"])
def test_every_flip_of_every_bit_is_noticed(tmp_path: Path, damaged: Any, name: str) -> None:
    data = (tmp_path / "c" / name).read_bytes()
    check_flips(damaged, name, data, list(range(8 * len(data))))


def check_flips(damaged: Any, name: str, data: bytes, bits: list[int]) -> None:
    for bit in bits:
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        assert damaged(name, bytes(altered)), f"bit {bit}"


@pytest.mark.parametrize("data", [None, b"", b"{}", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b"[" * 1000, bytes(500)])
def test_other_damage_is_noticed(damaged: Any, data: bytes | None) -> None:
    if data is not None:  # without a manifest there is no checkpoint
        assert damaged("round-000006.json", data)
    assert damaged("round-000006.safetensors", data)


def test_a_manifest_of_another_round_is_noticed(tmp_path: Path, damaged: Any) -> None:
    folder = tmp_path / "c"
    tensors = (folder / "round-000006.safetensors").read_bytes()
    (folder / "round-000006.safetensors").write_bytes((folder / "round-000004.safetensors").read_bytes())
    assert damaged("round-000006.json", (folder / "round-000004.json").read_bytes())
    (folder / "round-000006.safetensors").write_bytes(tensors)


def test_another_format_is_not_read(tmp_path: Path, damaged: Any) -> None:
    from laconic.engine.checkpoint import _signed

    body = json.loads((tmp_path / "c" / "round-000006.json").read_bytes())
    del body["sha256"]
    assert damaged("round-000006.json", _signed({**body, "format": 2}))


def test_the_first_is_used_when_the_newest_two_are_damaged(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, 0, 2, 4)
    for number in (2, 4):
        (tmp_path / f"round-{number:06d}.json").write_bytes(b"{")
    loaded = made.load()
    assert loaded is not None
    assert identity(loaded[0]) == identity(state_at(0))


def test_if_all_are_damaged_that_is_an_error(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, 0, 2, 4)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"^none of the 3 checkpoints in .* can be read; .*--overwrite\.$"):
        made.load()


# --- disks that fail ---------------------------------------------------------------------------------------------

STEPS = ["open", "write", "fsync", "replace", "fsync folder"]


def failing(monkeypatch: pytest.MonkeyPatch, step: str, *, at: int, error: int) -> None:
    """Let the `at`-th such step of `write_atomically` fail."""
    left = iter(range(at, -1, -1))

    def fail_maybe() -> None:
        if next(left, -1) == 0:
            raise OSError(error, os.strerror(error))

    if step in ("fsync", "fsync folder"):
        honest = os.fsync

        def fsync(handle: int) -> None:
            if Path(f"/proc/self/fd/{handle}").is_dir() == (step == "fsync folder"):
                fail_maybe()
            honest(handle)

        monkeypatch.setattr(os, "fsync", fsync)
    elif step == "replace":
        honest_replace = Path.replace

        def replace(path: Path, target: Path) -> Path:
            fail_maybe()
            return honest_replace(path, target)

        monkeypatch.setattr(Path, "replace", replace)
    else:
        honest_open = Path.open

        def open_(path: Path, *args: Any, **kwargs: Any) -> Any:
            if args != ("wb",):
                return honest_open(path, *args, **kwargs)
            if step == "open":
                fail_maybe()
                return honest_open(path, *args, **kwargs)
            file = honest_open(path, *args, buffering=0)
            honest_write = file.write

            class Filling:
                """A file on a disk that fills up: half of the data is written, then there is no space."""

                def __enter__(self) -> Filling:
                    return self

                def __exit__(self, *_: object) -> None:
                    file.close()

                def write(self, data: bytes) -> int:
                    honest_write(data[: len(data) // 2])
                    fail_maybe()
                    honest_write(data[len(data) // 2 :])
                    return len(data)

                def __getattr__(self, name: str) -> Any:
                    return getattr(file, name)

            return Filling()

        monkeypatch.setattr(Path, "open", open_)


def test_files_are_synced_renamed_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data before the name, the name before anything else; the manifest, which makes it count, last of all."""
    steps = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(handle: int) -> None:
        steps.append(("sync", Path(f"/proc/self/fd/{handle}").readlink().name))
        fsync(handle)

    def noting_replace(path: Path, target: Path) -> Path:
        steps.append(("rename", target.name))
        assert path.parent == target.parent
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    checkpoints(tmp_path / "c", 3)
    assert steps == [
        step
        for name in ("round-000003.safetensors", "round-000003.json")
        for step in (("sync", f"{TEMPORARY}{os.getpid()}-{name}"), ("rename", name), ("sync", "c"))
    ]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_a_disk_that_fails_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, at: int, error: int
) -> None:
    """At every step of both files: an error that names the path, nothing half-written, and what was there is there."""
    made = checkpoints(tmp_path, 0, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        failing(patch, step, at=at, error=error)
        with pytest.raises(RunError) as caught:
            made.save(state_at(4), {"metrics_bytes": 4})
    said = os.strerror(error).lower()
    path = tmp_path / ("round-000004.safetensors" if at == 0 else "round-000004.json")
    assert str(caught.value) == (f"cannot write {path}: {said}; free some space or choose another folder with --out.")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.startswith(TEMPORARY)]
    whole = checkpoints(tmp_path.parent / f"{tmp_path.name}-whole", 0, 2, 4).folder
    assert all(data == (whole / name).read_bytes() for name, data in after.items()), "whole files only"
    loaded = made.load()
    assert loaded is not None
    # Only after the very last step has the new one come into being: its name was there, and merely not synced.
    assert loaded[0].round == (4 if (step, at) == ("fsync folder", 1) else 2)
    made.save(state_at(6), {})
    assert {int(path.stem[6:]) for path in tmp_path.glob("*.json")} >= {0, 6}


def test_a_disk_on_which_nothing_can_be_deleted_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(RunError, match="read-only file system"):
        write_atomically(tmp_path / "x", b"data")
    assert not (tmp_path / "x").exists()


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunError, match=r"cannot write .*file/x: not a directory"):
        write_atomically(tmp_path / "file" / "x", b"data")
    with pytest.raises(RunError, match="no such file or directory"):
        write_atomically(tmp_path / "nowhere" / "x", b"data")


def test_a_file_that_would_grow_beyond_the_limit(tmp_path: Path, fork: Any) -> None:
    """A true refusal by the kernel, in the middle of the write."""

    def save() -> None:
        made = checkpoints(tmp_path / "c", 0, 2)
        before = names(made.folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        big = State(4, {"w": torch.zeros(10_000)})
        with pytest.raises(RunError, match=r"cannot write .*round-000004\.safetensors: file too large"):
            made.save(big, {})
        assert names(made.folder) == before
        loaded = made.load()
        assert loaded is not None
        assert loaded[0].round == 2

    assert fork(save).wait() == 0, (tmp_path / "child.log").read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB, where we may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "none", folder]).returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    made = checkpoints(small_disk, 0, 2)
    before = names(small_disk)
    big = State(4, {"w": torch.zeros(30_000)})
    with pytest.raises(RunError, match=r"cannot write .*round-000004\.safetensors: no space left on device"):
        made.save(big, {})
    assert names(small_disk) == before
    loaded = made.load()
    assert loaded is not None
    assert loaded[0].round == 2
