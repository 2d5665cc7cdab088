from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest

from laconic.core import ConfigError, DataError, LaconicError, PayloadError, RunError, UserError, did_you_mean


def test_the_tree_is_the_one_that_is_drawn() -> None:
    # Exit code 2 goes by UserError alone: see laconic.cli.main.
    assert LaconicError.__bases__ == (Exception,)
    assert UserError.__bases__ == (LaconicError,)
    for error in (ConfigError, DataError, RunError):
        assert error.__bases__ == (UserError,)
    assert PayloadError.__bases__ == (LaconicError,)  # bytes from elsewhere are nobody's mistake at the keyboard


EXITS = """
import contextlib, io, json
import laconic.cli as cli
from laconic.core import ConfigError, DataError, PayloadError, RunError

def ended(error):
    def app():
        raise error
    cli.app = app
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            cli.main()
        except SystemExit as exit:
            return [exit.code, said.getvalue()]
        except BaseException as other:
            return [type(other).__name__, said.getvalue()]

errors = [ConfigError("a."), DataError("b."), RunError("c."), KeyboardInterrupt(), PayloadError("d", "e"), ValueError()]
print(json.dumps([ended(error) for error in errors]))
"""


def test_exit_codes() -> None:
    # In a process of its own, because typer's imports warn.
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        [2, "error: a.\n"],
        [2, "error: b.\n"],
        [2, "error: c.\n"],
        [130, "interrupted\n"],
        ["PayloadError", ""],  # not the user's mistake: a traceback is right
        ["ValueError", ""],
    ]


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
