from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from laconic import cli
from laconic.core import ConfigError, DataError, LaconicError, PayloadError, RunError, UserError, did_you_mean


def test_the_tree_is_the_one_that_is_drawn() -> None:
    # Exit code 2 goes by UserError alone: see laconic.cli.main.
    assert LaconicError.__bases__ == (Exception,)
    assert UserError.__bases__ == (LaconicError,)
    for error in (ConfigError, DataError, RunError):
        assert error.__bases__ == (UserError,)
    assert PayloadError.__bases__ == (LaconicError,)  # bytes from elsewhere are nobody's mistake at the keyboard


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a."), 2, "error: a.\n"),
        (DataError("b."), 2, "error: b.\n"),
        (RunError("c."), 2, "error: c.\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", raising(error))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (code, said)


@pytest.mark.parametrize("error", [PayloadError("d", "e"), ValueError()])
def test_what_is_not_the_users_mistake_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", raising(error))
    with pytest.raises(type(error)):
        cli.main()


def raising(error: BaseException) -> Callable[[], None]:
    def app() -> None:
        raise error

    return app


def test_a_payload_error_says_whose_and_why() -> None:
    bare = PayloadError("checksum", "the frame was altered")
    assert str(bare) == "the frame was altered [checksum]"
    placed = bare.at(client=0, round=4)
    assert str(placed) == "client 0, round 4: the frame was altered [checksum]"
    assert (placed.reason, placed.detail, placed.client, placed.round) == ("checksum", "the frame was altered", 0, 4)
    assert bare.client is None  # `at` makes another one


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("placed", [True, False])
def test_a_payload_error_survives_the_way_between_processes(copied: object, placed: bool) -> None:
    error = PayloadError("length", "1204 symbols")
    error = error.at(client=17, round=4) if placed else error
    again = copied(error)  # type: ignore[operator]
    assert type(again) is PayloadError
    assert vars(again) == vars(error)
    assert str(again) == str(error)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("fedavgg", "did you mean 'fedavg'?"),
        ("Fedprox", "did you mean 'fedprox'?"),
        ("zzz", "known: fedavg, fedopt, fedprox."),
        ("", "known: fedavg, fedopt, fedprox."),
    ],
)
def test_did_you_mean(word: str, hint: str) -> None:
    assert did_you_mean(word, ["fedprox", "fedavg", "fedopt"]) == hint
