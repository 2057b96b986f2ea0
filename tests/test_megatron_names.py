"""Claim: every Megatron-Core and torch name that the program patches or imports still exists.

Why the test shows it: a fresh interpreter, in which nothing is patched (a patch would create a name that
has gone), looks up the platform module's own list and every `from megatron… import …` of the package, read
from the syntax tree.
Not shown: that a name still means what it meant, which the numerical tests show; names reached by attribute.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lrl.platform_cpu import PATCHED_NAMES

ROOT = Path(__file__).resolve().parents[1]

LOOK_UP = """
import importlib, json, sys
missing = []
for dotted in json.load(sys.stdin):
    parts = dotted.split(".")
    try:
        for count in range(len(parts), 0, -1):
            try:
                target = importlib.import_module(".".join(parts[:count]))
                break
            except ModuleNotFoundError as error:
                if not ".".join(parts[:count]).startswith(error.name or "?"):
                    raise
        for part in parts[count:]:
            target = getattr(target, part)
    except Exception as error:
        missing.append(f"{dotted}: {type(error).__name__}: {error}")
print("MISSING " + json.dumps(missing))
"""


def look_up(names: list[str]) -> list[str]:
    """Those of the dotted names that a fresh interpreter cannot resolve, each with the reason."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP],
        input=json.dumps(names), capture_output=True, text=True, timeout=300, env=environment, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.rsplit("MISSING ", 1)[1])


def imported_names() -> list[str]:
    """Dotted names of every `import megatron…` and `from megatron… import …` in the package."""
    names: set[str] = set()
    for path in (ROOT / "megatron_lrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.level == 0
                and (node.module or "").startswith("megatron.")
            ):
                names.update(f"{node.module}.{name.name}" for name in node.names)
            elif isinstance(node, ast.Import):
                names.update(name.name for name in node.names if name.name.startswith("megatron."))
    return sorted(names)


def test_every_patched_and_imported_name_exists(report) -> None:
    seeded = ["megatron.core.no_such_module.name", "torch.cuda.no_such_name"]
    names = sorted({*PATCHED_NAMES, *imported_names()})
    missing = look_up([*names, *seeded])
    report("names looked up", len(names))
    assert len(names) > len(PATCHED_NAMES) > 10
    assert [m for m in missing if m.startswith(tuple(seeded))] == missing, "\n".join(missing)
    assert len(missing) == len(seeded)  # the look-up does notice a name that is gone


def test_the_list_covers_what_the_platform_module_assigns() -> None:
    """What platform_cpu assigns on another module appears, by its last part, in PATCHED_NAMES."""
    tree = ast.parse((ROOT / "megatron_lrl" / "platform_cpu.py").read_text())
    listed = {name.rsplit(".", 1)[1] for name in PATCHED_NAMES}
    assigned = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and not (
                    isinstance(target.value, ast.Name) and target.value.id == "self"
                ):
                    owner = target.value.attr if isinstance(target.value, ast.Attribute) else ""
                    assigned.add(owner if target.attr.startswith("__") else target.attr)
    assert len(assigned) > 5
    assert assigned <= listed, f"patched but not in PATCHED_NAMES: {sorted(assigned - listed)}"


def test_the_pinned_version_is_the_installed_one() -> None:
    pinned = re.search(r'"megatron-core==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    if pinned is None:
        pytest.fail("pyproject.toml must pin megatron-core exactly: private names are patched")
    assert importlib.metadata.version("megatron-core") == pinned.group(1)
