"""One in-process runtime and one folder of models for the LastKV tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lrl.runtime import Layout, Runtime, runtime_scope


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """A world of one rank, in the test process."""
    with runtime_scope(Layout()) as opened:
        yield opened


@pytest.fixture(scope="session")
def models(session_dir: Path) -> Path:
    folder = session_dir / "lastkv"
    folder.mkdir()
    return folder
