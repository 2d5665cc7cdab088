"""Texts by who speaks: Shakespeare's plays by role, and the files of LEAF.

A text becomes numbers by a fixed alphabet: 0 for what is not in it (and for padding), then the line break and the
printable characters of ASCII. So models of one federation can be used on another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.core import DataError, Key
from laconic.data.federation import Federation
from laconic.data.fetch import archive_texts
from laconic.data.sequences import next_tokens

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""The characters that have a number of their own, from 1 on."""
_TOKENS = len(ALPHABET) + 1
_NUMBERS = np.zeros(256, dtype=np.int64)
_NUMBERS[np.frombuffer(ALPHABET.encode(), dtype=np.uint8)] = np.arange(1, _TOKENS)
_SPEAKER = re.compile(r"\n\n([A-Z][A-Za-z' ]{1,24})[.:]\n(?=\S)")
_DIRECTION = re.compile(r"\[[^\]]*\]")
_NO_ROLE = re.compile(r"(?i)act|scene|exit|exeunt|all|both|the |finis|epilogue|prologue|chorus")


def characters(text: str) -> NDArray[np.int64]:
    """A text as numbers.

    >>> characters("Ay.").tolist()
    [35, 91, 16]
    """
    return _NUMBERS[np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)]


def shakespeare(
    *,
    clients: int | None = None,
    length: int = 80,
    min_characters: int = 160,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Federation:
    """Shakespeare's plays, a client for every role, the next character to be predicted (LEAF's task).

    Roles with fewer than `min_characters` are left out; `clients` of the others are drawn by `seed` (all, unless
    given). `laconic data get shakespeare` brings the texts.
    """
    roles = {
        f"{play} {role}": text
        for play, body in archive_texts("shakespeare")
        for role, text in sorted(roles_of(body).items())
        if len(text) >= min_characters
    }
    if clients is not None and not 1 <= clients <= len(roles):
        raise DataError(
            f"shakespeare: clients must be 1 to {len(roles)}, the roles with at least {min_characters} characters; "
            f"got {clients}."
        )
    names = list(roles)
    if clients is not None:
        drawn = Key.from_seed(seed).fold_in("roles").numpy().permutation(len(names))[:clients]
        names = [names[place] for place in sorted(drawn)]
    parts = [next_tokens([characters(roles[name])], length=length) for name in names]
    return Federation.from_clients(parts, classes=_TOKENS, seed=seed, test_fraction=test_fraction, name="shakespeare")


def roles_of(play: str) -> dict[str, str]:
    """What every role of a play says, stage directions left out.

    >>> roles_of("ACT I.\\n\\nHam.\\nWords, words,\\n[Reads.] words.\\n\\nPol.\\nWhat is the matter?\\n")
    {'HAM': 'Words, words,\\n words.\\n', 'POL': 'What is the matter?\\n'}
    """
    said: dict[str, list[str]] = {}
    pieces = _SPEAKER.split(play.replace("\r", ""))
    for role, speech in zip(pieces[1::2], pieces[2::2], strict=True):
        if not _NO_ROLE.match(role):
            # A speech ends where the next scene begins: at more than one empty line.
            words = _DIRECTION.sub("", re.split(r"\n\n\n", speech)[0]).strip()
            said.setdefault(role.upper(), []).append(words + "\n")
    return {role: "".join(speeches) for role, speeches in said.items()}


def leaf(*, path: str, clients: int | None = None, test_fraction: float = 0.2, seed: int = 0) -> Federation:
    """A dataset in the JSON of LEAF (Caldas et al., 2018): a file, or a folder with `train` and `test` in it.

    A user is a client. Inputs are lists of numbers, or texts, of which every next character is to be predicted.
    """
    root = Path(path).expanduser()
    train, test = (dict(_users(root / part)) if (root / part).is_dir() else {} for part in ("train", "test"))
    train = train or dict(_users(root))
    if not train:
        raise DataError(f"leaf: {root} holds no JSON file with 'users' and 'user_data'.")
    names = sorted(train)[:clients]
    pairs = [_pair(train[name], f"user {name!r}") for name in names]
    if all(name in test for name in names):
        tests = [_pair(test[name], f"user {name!r}") for name in names]
        return Federation.from_clients(pairs, client_tests=tests, classes=_classes(pairs), seed=seed, name=root.name)
    return Federation.from_clients(
        pairs, classes=_classes(pairs), test_fraction=test_fraction, seed=seed, name=root.name
    )


def _users(place: Path) -> Iterator[tuple[str, Any]]:
    files: Iterable[Path] = sorted(place.glob("*.json")) if place.is_dir() else [place]
    for file in files:
        try:
            body = json.loads(file.read_text(encoding="utf-8"))
            yield from ((str(user), body["user_data"][user]) for user in body["users"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = " ".join(str(error).split())
            raise DataError(f"leaf: {file} is no file of LEAF ({type(error).__name__}: {said}).") from None


def _pair(user: Any, where: str) -> tuple[Any, Any]:
    x, y = user.get("x"), user.get("y")
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not x:
        raise DataError(f"leaf: {where} must have lists x and y of one length.")
    if isinstance(x[0], str):
        rows = [torch.from_numpy(characters(text + follows)) for text, follows in zip(x, y, strict=True)]
        if len({len(row) for row in rows}) > 1:
            raise DataError(f"leaf: {where} has texts of different lengths.")
        table = torch.stack(rows)
        return table[:, :-1], table[:, 1:]
    return np.asarray(x, dtype=np.float32), np.asarray(y)


def _classes(pairs: list[tuple[Any, Any]]) -> int | None:
    return _TOKENS if isinstance(pairs[0][1], torch.Tensor) else None
