"""Skips with their reasons, session folders, and the measured numbers in pytest's closing summary."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.costly import mark_costly, order
from harness.worlds import World, left_out

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network

MEASURED = "measured"  # a property of a test's report, which also reaches the summary from another process


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks cases in worlds beyond the covering set, and costly ones, as slow, and what this machine cannot run as
    skipped."""
    mark_worlds(items)
    mark_costly(items, not any("::" in str(argument) for argument in config.args))
    order(items)
    missing: dict[str, str] = {}
    if any(item.get_closest_marker("gpu") for item in items) and not cuda():
        missing["gpu"] = "no CUDA device on this machine"
    if importlib.util.find_spec("transformer_engine") is None:
        missing["te"] = "Transformer Engine is not installed"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def mark_worlds(items: list[pytest.Item]) -> None:
    """Marks a test's cases in the worlds that `left_out` names as slow, unless it is marked `every_world`."""
    tests: dict[str, list[tuple[pytest.Item, World]]] = {}
    for item in items:
        of_case = getattr(item, "callspec", None)
        worlds = [] if of_case is None else [v for v in of_case.params.values() if isinstance(v, World)]
        unmarked = not any(item.get_closest_marker(marker) for marker in ("slow", "every_world"))
        if worlds and unmarked:
            tests.setdefault(item.nodeid.split("[")[0], []).append((item, worlds[0]))
    for cases in tests.values():
        slow = left_out([world for _, world in cases])
        for item, world in cases:
            if world in slow:
                item.add_marker(pytest.mark.slow)


def cuda() -> bool:
    """Whether a CUDA device is present."""
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers in every run, whatever ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """`report(name, value)`: the closing summary lists the number under the test that measured it."""

    def add(name: str, value: object) -> None:
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        request.node.user_properties.append((MEASURED, (name, text)))

    return add


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all tests of the session share, e.g. for tiny models that are written once."""
    return tmp_path_factory.mktemp("session")


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[str], Path]:
    """`write_config(text)`: a TOML file of these settings."""

    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    done = [
        r for reports in terminalreporter.stats.values() for r in reports if isinstance(r, pytest.TestReport)
    ]
    numbers = [
        (report.nodeid, *value)
        for report in sorted(done, key=lambda report: report.nodeid)
        if report.when == "call"
        for kind, value in report.user_properties
        if kind == MEASURED
    ]
    if not numbers:
        return
    terminalreporter.section("measured")
    width = max(len(name) for _, name, _ in numbers)
    shown = ""
    for test, name, text in numbers:
        if test != shown:
            terminalreporter.write_line(test)
            shown = test
        terminalreporter.write_line(f"    {name:<{width}}  {text}")
