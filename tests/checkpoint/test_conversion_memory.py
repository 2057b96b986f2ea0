"""Claim: the memory that `import` and `export` take does not grow with the model: it is that of a tensor or two, below
two shards of the directory.

Why the tests show it: a model is written in shards, converted in a process of its own, and the peak of its anonymous
memory, looked at every millisecond, is compared with what the process needed before the conversion; the model is
larger than the bar. Not shown: pages of mapped files, which the kernel keeps or takes back as it likes; Transformer
Engine; models whose largest tensor fills a shard (`export` holds two).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's count of anonymous memory"
)
TOOL = Path(__file__).parents[2] / "tools" / "measure_import.py"


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("measure_import", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(root: Path, gigabytes: float, shard_bytes: int) -> None:
    tool = _tool()
    shard = tool.write_model(root / "hf", gigabytes, shard_bytes)
    total = sum(path.stat().st_size for path in (root / "hf").glob("*.safetensors"))
    assert total > 2.9 * shard, "the whole model must not pass"
    for verb, source, target in (("import", "hf", "ckpt"), ("export", "ckpt", "back")):
        before, above = tool.measure(verb, root / source, root / target)
        print(f"{verb}: {above / shard:.2f} shards above {before / 1e6:.0f} MB", file=sys.stderr)
        assert above < 2 * shard, (
            f"{verb}: {above / 1e6:.0f} MB above the interpreter, a shard is {shard / 1e6:.0f} MB"
        )


def test_a_small_model_in_four_shards(tmp_path: Path) -> None:
    _check(tmp_path, 0.6, 150_000_000)


@pytest.mark.slow
def test_a_checkpoint_of_two_gigabytes(tmp_path: Path) -> None:
    _check(tmp_path, 2.0, 256_000_000)
