"""Claim: imports point one way, every room has a README that names its files, no file has two subjects' length.

Why the tests show it: every import statement of the package, also those inside functions and under
TYPE_CHECKING, is read from the syntax tree and held against one table; the reader itself is tried on seeded
violations.
Not shown: imports by a computed name (`importlib.import_module(variable)`), whether a README is true.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_lrl"
LONGEST = 400

LEAVES = {
    "settings_adapter",
    "cli_text",
    "errors",
    "reading",
    "settings",
    "settings_data",
    "table",
    "arguments",
    "precision",
    "config",
    "outputs",
    "preflight",
    "runtime",
    "platform_cpu",
    "tracking",
}
RUN = {"layers", "models", "checkpoint", "adapters", "run"}
WINDOW = RUN | {"passes", "experts", "lifetimes"}

# Room -> the rooms it may import, besides itself and the leaves.
ALLOWED: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "": set(),  # megatron_lrl/__init__.py
    "layers": set(),
    "models": {"layers"},
    "checkpoint": {"layers", "models"},
    "adapters": {"layers", "models", "checkpoint"},
    "run": {"layers", "models", "checkpoint", "adapters"},
    "passes": RUN,
    "experts": RUN,
    "lifetimes": RUN | {"passes", "experts"},
    "rollout": WINDOW,
    "plan": WINDOW,
    "rl": WINDOW | {"rollout", "plan"},
    "checks": WINDOW | {"rollout", "rl"},
    "cli": WINDOW | {"rollout", "plan", "rl", "checks"},
    "__main__": {"cli"},
}
# What lives as long as the program: the leaf that passes and windows stand on.
OWN_ROOM = {("lifetimes", name): "run" for name in ("run", "identity", "ledger", "optim")}


def room(parts: tuple[str, ...]) -> str:
    """The room of a module of the package, by its dotted parts after `megatron_lrl`."""
    return OWN_ROOM.get(parts[:2], parts[0]) if parts else ""


def imported_rooms(source: str, module: tuple[str, ...], is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of the package's own modules.

    Args:
        module: the module's dotted parts after `megatron_lrl`, e.g. ("layers", "softmax", "core").
        is_package: whether the source is a package's `__init__.py`, which shifts relative imports by one.
    """
    package = module if is_package else module[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                first, *rest = name.name.split(".")
                if first == "megatron_lrl":
                    yield node.lineno, room(tuple(rest))
        elif isinstance(node, ast.ImportFrom):
            named = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = package[: len(package) - (node.level - 1)] + named
            elif named and named[0] == "megatron_lrl":
                base = named[1:]
            else:
                continue
            if base:
                yield node.lineno, room(base)
            else:  # `from megatron_lrl import layers`
                for name in node.names:
                    yield node.lineno, name.name if name.name in ALLOWED else ""


def violations(source: str, module: tuple[str, ...], is_package: bool = False) -> list[str]:
    """One line for every import that the table does not allow."""
    own = room(module)
    if own not in ALLOWED:
        return [f"room {own!r} is not in the table"]
    allowed = ALLOWED[own] | LEAVES | {own, ""}
    return [
        f"{'.'.join(module)}:{line}: {own or 'the package root'} may not import {target}"
        for line, target in imported_rooms(source, module, is_package)
        if target not in allowed
    ]


def sources() -> list[Path]:
    """Every Python file of the package."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    found = violations(path.read_text(), parts[:-1] if is_package else parts, is_package)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "module", "is_package", "expected"),
    [
        ("from megatron_lrl.rl.loss import x", ("layers", "softmax", "core"), False, "may not import rl"),
        ("from megatron_lrl import rl", ("lifetimes", "window"), False, "may not import rl"),
        (
            "import megatron_lrl.lifetimes.run as run",
            ("layers", "softmax", "kv"),
            False,
            "may not import run",
        ),
        ("from ..cli import main", ("rl", "trainer"), False, "may not import cli"),
        ("from ..lifetimes import run", ("layers",), True, "may not import lifetimes"),
        ("def f():\n    from megatron_lrl.models import build", ("errors",), False, "may not import models"),
        ("import torch", ("new_room", "a"), False, "not in the table"),
    ],
)
def test_the_reader_finds_seeded_violations(
    source: str, module: tuple[str, ...], is_package: bool, expected: str
) -> None:
    found = violations(source, module, is_package)
    assert len(found) == 1 and expected in found[0]


def test_the_reader_allows_what_the_table_allows() -> None:
    source = (
        "from megatron_lrl.errors import UserError\nfrom .layout import x\nfrom megatron_lrl import runtime"
    )
    assert violations(source, ("layers", "softmax", "core")) == []
    assert violations("from megatron_lrl.lifetimes.run import Run\nimport torch", ("rl", "trainer")) == []


def test_the_table_itself_has_no_cycle() -> None:
    remaining = {name: set(targets) for name, targets in ALLOWED.items()}
    while remaining:
        free = [name for name, targets in remaining.items() if not targets & remaining.keys()]
        assert free, f"rooms that import each other: {sorted(remaining)}"
        for name in free:
            del remaining[name]


def module_of(path: Path) -> tuple[str, ...]:
    """Dotted parts by which other files import a file; tests stand on the path themselves."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] in ("tests", "tools") else parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_modules(source: str, module: tuple[str, ...], is_package: bool) -> Iterator[tuple[str, ...]]:
    """Dotted parts of everything that a source imports, wherever the statement stands."""
    package = module if is_package else module[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield tuple(name.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            named = tuple(node.module.split(".")) if node.module else ()
            base = (*package[: len(package) - (node.level - 1)], *named) if node.level else named
            yield base
            for name in node.names:  # a name may be a module
                yield (*base, name.name)


def circles(files: dict[tuple[str, ...], tuple[str, bool]]) -> list[list[str]]:
    """Sets of modules that import each other; ``files``: module -> its source, and whether it is a package's face."""
    arrows = {
        module: {target for target in imported_modules(source, module, face) if target in files} - {module}
        for module, (source, face) in files.items()
    }
    remaining = dict(arrows)
    while free := [m for m, targets in remaining.items() if not targets & remaining.keys()]:
        for module in free:
            del remaining[module]
    while free := [m for m in remaining if not any(m in targets for targets in remaining.values())]:
        for module in free:  # it leads into a circle, and is in none
            del remaining[module]
    return [sorted(".".join(m) for m in remaining)] if remaining else []


def test_no_file_imports_another_in_a_circle() -> None:
    written = [
        *sources(),
        *(
            p
            for top in ("tests", "tools")
            for p in (ROOT / top).rglob("*.py")
            if "__pycache__" not in p.parts
        ),
    ]
    files = {module_of(path): (path.read_text(), path.name == "__init__.py") for path in written}
    assert len(files) > 200
    assert not circles(files)


def test_a_seeded_circle_is_found() -> None:
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.three import x"
    files = {
        ("a",): ("", True),
        ("a", "one"): ("from a import two", False),
        ("a", "two"): (typing, False),
        ("a", "three"): ("def f():\n    from . import one", False),
        ("b",): ("import a.one", False),
    }
    assert circles(files) == [["a.one", "a.three", "a.two"]]
    files["a", "two"] = ("", False)
    assert not circles(files)


def rooms() -> list[Path]:
    """Every folder with Python files in the package, and the other top-level rooms."""
    folders = {path.parent for path in sources()} - {PACKAGE}
    return sorted(folders | {ROOT / name for name in ("tests", "tools", "examples", "ci")})


@pytest.mark.parametrize("folder", rooms(), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_every_room_has_a_readme(folder: Path) -> None:
    readme = folder / "README.md"
    assert readme.exists(), f"{folder.name} has no README.md"
    text = readme.read_text()
    assert len(text) > 200, f"{folder.name}/README.md says nothing yet"
    if not folder.is_relative_to(PACKAGE):
        return
    named, here = set(re.findall(r"`(\w+\.py)`", text)), {path.name for path in folder.glob("*.py")}
    assert here - named <= {"__init__.py"}, f"{readme} does not name {sorted(here - named)}"
    assert named <= here, f"{readme} names {sorted(named - here)}, which are not here"


def test_the_tests_readme_names_every_folder() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    tests = [p.parent for p in (ROOT / "tests").rglob("test_*.py")] + [ROOT / "tests" / "harness"]
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in tests if path != ROOT / "tests"}
    missing = sorted(name for name in folders if f"`{name}/`" not in text)
    assert not missing, f"tests/README.md does not say what these show: {missing}"


def test_no_file_is_longer_than_a_subject() -> None:
    written = [
        path
        for top in ("megatron_lrl", "tests", "tools", "examples", "ci")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".sh") and "__pycache__" not in path.parts
    ]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in written}
    assert len(lengths) > 20  # the walk found the repository
    long = {name: lines for name, lines in lengths.items() if lines > LONGEST}
    assert not long, f"longer than {LONGEST} lines: {long}"


def test_every_test_module_opens_with_its_claim() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        opening = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(opening) > 80, (
            f"{path.relative_to(ROOT)}: the docstring must say what is shown, why, and what is not"
        )
