from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core import RunError, tree_sha256
from laconic.engine import Checkpoints, ClientStore, DiskStore, RunDirectory, Store, execute, pack, unpack

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20),
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES), st.integers(0, 9)),
        max_size=5,
    )
)
def test_what_is_packed_is_unpacked(shapes: dict[str, tuple[list[int], torch.dtype, int]]) -> None:
    tree = {name: torch.full(shape, value).to(dtype) for name, (shape, dtype, value) in shapes.items()}
    unpacked = unpack(pack(tree))
    assert tree_sha256(unpacked) == tree_sha256(tree)


def test_nothing_costs_nothing() -> None:
    assert pack({}) == b""
    assert unpack(b"") == {}


def test_leaves_may_share_memory_and_have_any_strides() -> None:
    """A state may hold a tree under two names, parts of one vector, and transposed views."""
    vector = torch.arange(12.0)
    tree = {"a": vector[:6], "b": vector[6:], "whole": vector, "again": vector, "t": vector.view(3, 4).T}
    before = tree_sha256(tree)
    assert tree_sha256(unpack(pack(tree))) == before
    assert tree_sha256(tree) == before


@pytest.mark.parametrize("kind", [ClientStore, DiskStore])
def test_a_store_keeps_only_clients_that_have_something(kind: Any) -> None:
    store: Store = kind()
    store[7], store[2], store[5] = b"x", b"y", b""
    assert list(store) == [2, 7]
    store[7] = b""
    assert dict(store) == {2: b"y"}
    del store[2]
    assert len(store) == 0
    assert store.get(2, b"") == b""


# --- on disk ---------------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_staged_counts_when_it_is_kept(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store[1] = b"old"
    kept, dropped = store.stage(1, b"new"), store.stage(2, b"never")
    assert dict(store) == {1: b"old"}
    store.keep(1, kept)
    store.discard(dropped)
    assert dict(store) == {1: b"new"}
    assert names(tmp_path) == ["1-1.state"]


def test_a_version_that_a_checkpoint_means_stays(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store[1], store[2] = b"one", b"two"
    said, _ = store.pin()
    store[1] = b"later"
    store[1] = b"later still"
    assert names(tmp_path) == ["1-0.state", "1-3.state", "2-1.state"]  # and not the one in between
    found = DiskStore.found(tmp_path, said)
    assert dict(found) == {1: b"one", 2: b"two"}
    found.prune({"1-0.state", "2-1.state"})
    assert names(tmp_path) == ["1-0.state", "2-1.state"]
    found[1] = b"again"  # under the number that the lost version had
    assert dict(found) == {1: b"again", 2: b"two"}


@pytest.mark.parametrize("harm", ["cut", "altered", "gone"])
def test_a_file_that_is_not_what_the_checkpoint_says_is_noticed(tmp_path: Path, harm: str) -> None:
    store = DiskStore(tmp_path)
    store[5] = b"precious"
    (said, _), path = store.pin(), tmp_path / "5-0.state"
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(b"precio" if harm == "cut" else b"PRECIOUS")
    with pytest.raises((ValueError, OSError)):
        DiskStore.found(tmp_path, said)


def test_without_a_folder_files_go_with_the_store() -> None:
    store = DiskStore()
    store[1] = b"x"
    folder = store.folder
    assert folder.exists()
    del store
    assert not folder.exists()


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)

    def full(file: object, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("laconic.engine.store.write_all", full)
    with pytest.raises(RunError, match=r"cannot write .*: no space left on device; free some space"):
        store[1] = b"x"


def run(toys: Any, out: Path | None, *, rounds: int = 4, **settings: Any) -> Any:
    simulation = toys.simulation(toys.remembering(), rounds=rounds, up="ef(topk:fraction=0.3)", **settings)
    directory = None if out is None else RunDirectory(out, "r")
    result = execute(simulation, {}, facts={}, directory=directory, resume=out is not None, checkpoint_every=1)
    state = simulation.state
    return result.summary["state_sha256"], dict(state.personal), dict(state.codec)


def test_where_states_lie_does_not_matter(toys: Any, tmp_path: Path) -> None:
    memory = run(toys, None)
    assert run(toys, None, store="disk") == memory
    assert run(toys, tmp_path / "a", store="disk") == memory
    assert run(toys, tmp_path / "b", store="disk", workers=2) == memory


def test_a_run_may_go_on_with_the_other_store(toys: Any, tmp_path: Path) -> None:
    whole = run(toys, None)
    for first, then in (("disk", "memory"), ("memory", "disk")):
        run(toys, tmp_path / first, rounds=2, store=first)
        assert run(toys, tmp_path / first, store=then) == whole


def test_old_versions_do_not_pile_up(toys: Any, tmp_path: Path) -> None:
    run(toys, tmp_path, rounds=8, store="disk")
    files = names(tmp_path / "r" / "clients" / "personal")
    # The newest two checkpoints of at most 12 clients, six of which changed in between; the first one was empty.
    assert len(files) <= 12 + 6
    found = Checkpoints(tmp_path / "r" / "checkpoints").load()
    assert found is not None
    assert isinstance(found[0].personal, DiskStore)


def test_a_damaged_state_sends_the_run_back_to_the_checkpoint_before(toys: Any, tmp_path: Path) -> None:
    whole = run(toys, tmp_path / "whole", store="disk")
    run(toys, tmp_path / "hurt", store="disk")
    folder = tmp_path / "hurt" / "r" / "clients" / "personal"
    newest = max(folder.iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    newest.write_bytes(b"rubbish")
    assert run(toys, tmp_path / "hurt", store="disk") == whole


def test_an_abandoned_round_leaves_no_files(toys: Any, tmp_path: Path) -> None:
    method = toys.remembering(before=_fail_for_one)
    broken = toys.simulation(method, rounds=1, min_replies=6, cohort=6, workers=1)
    broken.state.personal = DiskStore(tmp_path)
    (record,) = list(broken)
    assert "abandoned" in record
    assert names(tmp_path) == []


def _fail_for_one(client: Any) -> None:
    if client.id % 2:
        raise RuntimeError("no battery")
