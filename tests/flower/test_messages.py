from __future__ import annotations

import json
import socket
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.core import PayloadError
from laconic.flower.messages import Answer, Call, Envelope
from laconic.flower.states import FolderEntries, Lost, States
from laconic_relay import receive, send


@given(st.lists(st.binary(max_size=20), max_size=4), st.integers(0, 2**32 - 1))
def test_what_is_sealed_is_opened(frames: list[bytes], client: int) -> None:
    envelope = Envelope.of(Envelope.around(Answer(kind="done", client=client), frames)._asdict())
    assert envelope.open(Answer).client == client
    assert envelope.frames() == frames


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "words": st.one_of(st.text(max_size=30), st.binary(max_size=3), st.just('{"kind":"done"}')),
            "lengths": st.one_of(st.text(alphabet="0123456789 x-", max_size=20), st.integers()),
            "payload": st.one_of(st.binary(max_size=20), st.text(max_size=3)),
        },
    )
)
def test_malformed_messages_raise_one_error(values: dict[str, Any]) -> None:
    try:
        envelope = Envelope.of(values)
        envelope.open(Answer)
        envelope.frames()
    except PayloadError:
        pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"kind": "done", "client": -1}, "client: "),
        ({"kind": "done", "odd": 1}, "odd: "),
        ({"kind": "done", "personal": "../../x"}, "personal: "),
        ({"kind": "done", "metrics": {"a b": 1.0}}, "metrics"),
        ({"kind": "done", "sums": {str(i): 1.0 for i in range(65)}}, "sums"),
        ({"kind": "failed", "reason": "<b>"}, "reason: "),
        ({"kind": "done", "version": 1}, "messages of version 1, but this side speaks 3"),
    ],
)
def test_words_are_checked(words: dict[str, Any], said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        Envelope(json.dumps(words), "", b"").open(Answer)


def test_figures_that_are_not_finite_survive() -> None:
    said = Envelope.around(Answer(kind="done", metrics={"train_loss": float("nan")})).open(Answer)
    assert said.metrics["train_loss"] != said.metrics["train_loss"]


def test_a_call_says_only_what_it_has_to() -> None:
    assert Envelope.around(Call(kind="hello")).words == '{"kind":"hello"}'


@pytest.mark.parametrize("on_disk", [False, True])
def test_states_are_had_by_name_and_let_go(on_disk: bool, tmp_path: Path) -> None:
    entries: Any = FolderEntries(tmp_path / "states") if on_disk else {}
    states = States(entries)
    names = [states.put("personal", number, bytes([number])) for number in (1, 3, 4, 6)]
    states.prune("personal", floor=5, meant=names[1])
    assert [states.get("personal", name) for name in names[1:]] == [b"\x03", b"\x04", b"\x06"]
    with pytest.raises(Lost, match="round 1 is not here"):
        states.get("personal", names[0])
    entries[f"personal.{names[3]}"] = b"other"
    with pytest.raises(Lost, match="damaged"):
        states.get("personal", names[3])


@given(st.lists(st.binary(max_size=2000), max_size=4), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_the_way_to_the_resident(parts: list[bytes], words: dict[str, str]) -> None:
    words.pop("parts", None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = Thread(target=send, args=(ours, words, parts))
        thread.start()
        assert receive(theirs) == (words, parts)
        thread.join()
