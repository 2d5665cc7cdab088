"""What the source itself promises: arrows, public names, docstrings, no unsafe loading and no global randomness."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import laconic

SOURCE = Path(laconic.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in FILES}

# core ← {codecs, methods, models, data, privacy} ← model_file ← engine ← evaluations ← report ← experiment ← config
# ← {cluster ← comparison ← reproduce, flower} ← cli.
_PARTS = {"core", "codecs", "methods", "models", "data", "privacy"}
_ENGINE = {*_PARTS, "model_file", "engine"}
_REPORT = {*_ENGINE, "evaluations", "report"}
_EXPERIMENT = {*_REPORT, "experiment"}
MAY_USE: dict[str, set[str]] = {
    "core": set(),
    "codecs": {"core"},
    "models": {"core"},
    "data": {"core"},
    "privacy": {"core"},
    "methods": {"core", "models", "privacy"},
    "model_file": _PARTS,
    "engine": {*_PARTS, "model_file"},
    "evaluations": _ENGINE,
    "report": {*_ENGINE, "evaluations"},
    "experiment": _REPORT,
    "config": _EXPERIMENT,
    "exports": _EXPERIMENT,
    "planning": _EXPERIMENT,
    "progress": {"core", "engine"},
    "tensorboard": {"core", "engine"},
    "cluster": {*_EXPERIMENT, "config"},
    "comparison": {*_EXPERIMENT, "config", "cluster", "progress", "tensorboard"},
    "flower": {*_EXPERIMENT, "config", "progress"},
    "reproduce": {*_EXPERIMENT, "config", "cluster", "comparison", "progress"},
    "cli": {
        *_EXPERIMENT,
        "config",
        "exports",
        "planning",
        "flower",
        "progress",
        "tensorboard",
        "cluster",
        "comparison",
        "reproduce",
    },
    "testing": {*_EXPERIMENT, "config"},
    "__init__": {*_EXPERIMENT, "config", "comparison", "exports", "planning", "testing"},
}


def part_of(path: Path) -> str:
    """The part that a file belongs to: its package, or itself."""
    inside = path.relative_to(SOURCE).parts
    return inside[0] if len(inside) > 1 else path.stem


class Use(NamedTuple):
    """An import of something of laconic's."""

    part: str
    name: str
    line: int


def uses(path: Path, tree: ast.AST) -> Iterator[Use]:
    """Everything of laconic's that a file imports, wherever in the file."""
    package = ["laconic", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                words = alias.name.split(".")
                if words[0] == "laconic":
                    yield Use(words[1] if len(words) > 1 else "__init__", alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            words = (node.module or "").split(".") if node.module else []
            if node.level:
                words = package[: len(package) - node.level + 1] + words
            if words[:1] != ["laconic"]:
                continue
            for alias in node.names:
                # `from laconic import codecs` is an import of codecs; of anything else, one of the facade.
                part = words[1] if len(words) > 1 else alias.name if alias.name in MAY_USE else "__init__"
                yield Use(part, ".".join([*words, alias.name]), node.lineno)


def wrong_arrows(path: Path, tree: ast.AST) -> list[str]:
    own = part_of(path)
    return [
        f"{path.relative_to(SOURCE)}:{use.line} uses {use.name}"
        for use in uses(path, tree)
        if use.part != own and use.part not in MAY_USE[own]
    ]


# --- arrows ----------------------------------------------------------------------------------------------------------


def test_every_part_has_its_place_in_the_picture() -> None:
    assert {part_of(path) for path in FILES} <= set(MAY_USE)


def test_no_import_goes_against_the_arrows() -> None:
    assert [wrong for path, tree in MODULES.items() for wrong in wrong_arrows(path, tree)] == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/x.py", "from laconic.codecs import parse"),
        ("core/x.py", "import laconic.engine.round"),
        ("core/x.py", "from laconic import data"),
        ("codecs/x.py", "from laconic.methods.em import EM"),
        ("methods/x.py", "from laconic import codecs"),
        ("methods/x.py", "def f():\n    from ..codecs import parse"),
        ("models/x.py", "from laconic.methods import fedavg"),
        ("engine/x.py", "import laconic"),
        ("engine/x.py", "from laconic.evaluations import Global"),
        ("evaluations/x.py", "from laconic.report import describe"),
        ("model_file.py", "from laconic.engine import Run"),
        ("models/x.py", "from laconic import model_file"),
        ("engine/x.py", "from laconic import fit"),
        ("engine/x.py", "from ..config import read_table"),
        ("experiment.py", "from . import config"),
        ("codecs/x.py", "import laconic.testing"),
        ("privacy/x.py", "from laconic.methods import fedavg"),
        ("engine/x.py", "from laconic.reproduce import reproduce"),
        ("config.py", "from laconic.reproduce import reproduce"),
    ],
)
def test_the_walk_sees_a_wrong_arrow(file: str, line: str) -> None:
    assert len(wrong_arrows(SOURCE / file, ast.parse(line))) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("codecs/x.py", "from laconic.core import Key"),
        ("codecs/x.py", "from .wire import seal"),
        ("methods/x.py", "from laconic.models import models"),
        ("experiment.py", "from laconic import codecs"),
        ("engine/x.py", "from laconic.model_file import write_model"),
        ("evaluations/x.py", "from laconic.engine.workers import Pool"),
        ("cli.py", "from laconic.config import read_table"),
        ("core/x.py", "import laconicism, torch.nn"),
    ],
)
def test_the_walk_lets_right_arrows_be(file: str, line: str) -> None:
    assert wrong_arrows(SOURCE / file, ast.parse(line)) == []


def test_private_names_stay_in_their_part() -> None:
    taken = [
        f"{path.relative_to(SOURCE)}:{use.line} uses {use.name}"
        for path, tree in MODULES.items()
        for use in uses(path, tree)
        if use.part != part_of(path) and any(word.startswith("_") for word in use.name.split("."))
    ]
    assert taken == []


# --- public names ----------------------------------------------------------------------------------------------------

PACKAGES = [
    "laconic",
    *sorted(f"laconic.{path.parent.name}" for path in FILES if path.parent != SOURCE and path.stem == "__init__"),
]


def promised(tree: ast.Module) -> list[ast.stmt]:
    """What a module imports for type checkers only, and gives when it is asked for."""
    blocks = [node for node in tree.body if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"]
    return [node for block in blocks for node in block.body]


def bound_names(body: list[ast.stmt]) -> set[str]:
    """What statements bind, but dunders."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_all_that_a_package_has(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    public = module.__all__
    assert len(set(public)) == len(public)
    tree = MODULES[Path(module.__file__)]
    assert set(public) == bound_names(promised(tree) or tree.body)
    assert all(hasattr(module, each) for each in public)


def test_the_facade_has_nothing_of_its_own() -> None:
    tree = MODULES[SOURCE / "__init__.py"]
    own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert own == ["__getattr__", "__dir__"]
    tools = bound_names([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)])
    assert tools == {"import_module", "TYPE_CHECKING", "Any"}


def test_the_facade_gives_what_type_checkers_are_told() -> None:
    for node in promised(MODULES[SOURCE / "__init__.py"]):
        assert isinstance(node, ast.ImportFrom)
        home = importlib.import_module(str(node.module))
        for alias in node.names:
            there = importlib.import_module(f"laconic.{alias.name}") if home is laconic else getattr(home, alias.name)
            assert laconic.__getattr__(alias.name) is there, alias.name


@pytest.mark.parametrize("name", [*PACKAGES, "laconic.testing"])
def test_everything_public_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert inspect.getdoc(module)
    silent = []
    for each in module.__all__:
        found = getattr(module, each)
        if not (inspect.isfunction(found) or inspect.isclass(found) or inspect.ismodule(found)):
            continue
        silent += [each] if not _own_doc(found) else []
        if inspect.isclass(found) and found.__module__.startswith("laconic"):
            members = [(n, m) for n, m in vars(found).items() if not n.startswith("_")]
            silent += [f"{each}.{n}" for n, m in members if inspect.isfunction(m) and not _own_doc(m)]
    assert silent == []


def _own_doc(found: object) -> str:
    doc = getattr(found, "__doc__", "") or ""
    # Dataclasses and named tuples without a docstring get their signature for one.
    return "" if doc.startswith(f"{getattr(found, '__name__', '')}(") else doc.strip()


# --- nothing is loaded that could run --------------------------------------------------------------------------------

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
OWN_PIPES = "engine/workers.py"  # between our own processes, over pipes that nobody else has


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a call's function, as far as it is made of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Whatever could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] in PICKLES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in PICKLES:
                yield node.lineno, str(node.module)
            yield from (
                (node.lineno, f"torch.{a.name}") for a in node.names if (node.module, a.name) == ("torch", "load")
            )
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in {
                "eval",
                "exec",
                "compile",
                "__import__",
                "os.system",
                "os.popen",
                "torch.load",
                "torch.hub.load",
            }:
                yield node.lineno, name
            if name.endswith("read_pickle"):
                yield node.lineno, name
            for keyword in node.keywords:
                switched_on = not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
                if keyword.arg in {"allow_pickle", "shell", "trust_remote_code"} and switched_on:
                    yield node.lineno, f"{name}({keyword.arg}=…)"


def test_nothing_is_loaded_that_could_run() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): sorted({what for _, what in unsafe(tree)})
        for path, tree in MODULES.items()
        if any(unsafe(tree))
    }
    assert found == {OWN_PIPES: ["pickle"]}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import yaml",
        "def f():\n    from pickle import loads",
        "import joblib.numpy_pickle",
        "torch.load(path)",
        "from torch import load",
        "eval(text)",
        "exec(text)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "subprocess.run(text, shell=True)",
        "pandas.read_pickle(path)",
        "load_dataset(name, trust_remote_code=True)",
    ],
)
def test_the_walk_sees_what_is_unsafe(line: str) -> None:
    assert len(list(unsafe(ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line", ["module.eval()", "json.loads(text)", "np.load(path, allow_pickle=False)", "safetensors.torch.load(blob)"]
)
def test_the_walk_lets_be_what_is_safe(line: str) -> None:
    assert list(unsafe(ast.parse(line))) == []


# --- no global randomness --------------------------------------------------------------------------------------------

DRAWS = {"rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "poisson"}
DRAWS_IN_PLACE = {
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "random_",
    "log_normal_",
    "cauchy_",
    "geometric_",
}


def global_draws(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that read or seed a generator that everybody shares."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, "random") for name in names if name in {"random", "secrets"})
        elif isinstance(node, ast.Call):
            name, keywords = dotted(node.func), {k.arg for k in node.keywords}
            owner, _, last = name.rpartition(".")
            drawn = owner == "torch" and last in DRAWS
            seeded = last in {"Generator", "Philox"} or (last == "default_rng" and bool(node.args))
            shared = owner in {"np.random", "numpy.random"} and not seeded
            in_place = isinstance(node.func, ast.Attribute) and node.func.attr in DRAWS_IN_PLACE
            if (drawn or in_place) and "generator" not in keywords:
                yield node.lineno, name or node.func.attr  # type: ignore[attr-defined]
            elif shared or name in {"torch.manual_seed", "torch.seed", "torch.random.manual_seed"}:
                yield node.lineno, name


def test_nobody_draws_from_a_global_generator() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): sorted({what for _, what in global_draws(tree)})
        for path, tree in MODULES.items()
        if any(global_draws(tree))
    }
    # `isolated` seeds torch's and restores it; the checks look whether others leave the generators alone.
    assert found == {"core/random.py": ["torch.manual_seed"], "testing.py": ["np.random.get_state", "random"]}


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "from random import choice",
        "torch.rand(3)",
        "torch.randperm(n)",
        "torch.manual_seed(0)",
        "weight.normal_(0, 1)",
        "nn.init.uniform_(weight)",
        "np.random.rand(3)",
        "np.random.seed(0)",
        "np.random.default_rng()",
    ],
)
def test_the_walk_sees_global_draws(line: str) -> None:
    assert len(list(global_draws(ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "torch.rand(3, generator=key.torch())",
        "weight.normal_(0, 1, generator=generator)",
        "key.numpy().normal(size=3)",
        "np.random.Generator(np.random.Philox(key=1))",
        "np.random.default_rng(seed)",
        "from laconic.core.random import Key",
    ],
)
def test_the_walk_lets_keyed_draws_be(line: str) -> None:
    assert list(global_draws(ast.parse(line))) == []
