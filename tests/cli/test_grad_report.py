"""Claim: `grad` prints one JSON object whose numbers are numbers, with the settings that its contract reads and no
other, and with measured bytes; writing its file takes what a plan says.

Why this shows it: the command runs in this process as a user gives it, and what it prints is compared with what the
files say; the largest tensor of the file is read back.
It does not show: the gradient itself (see `worlds/`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracle.trajectories import write_jsonl
from safetensors.torch import load_file

from cli.runs import Runs
from megatron_lrl.checkpoint.hf_export import gradient_file_bytes
from megatron_lrl.checkpoint.streaming import build_meta_model
from megatron_lrl.cli import main
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.precision import DTYPES
from megatron_lrl.runtime import Layout, runtime_scope

RESPONSES = [{"ids": [5, 9, 4], "advantage": 1.0}, {"ids": [8, 2], "advantage": -1.0}]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_settings_and_bytes(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(tmp_path)
    group = {"id": "g", "prompt_ids": list(range(3, 20)), "responses": RESPONSES}
    recorded = write_jsonl(tmp_path / "t.jsonl", [group])
    said: dict[str, dict[str, Any]] = {}
    for contract in ("exact", "truncated"):
        settings = [f"prefix.contract={contract}", "prefix.truncate_tokens=5", f"model.dtype={dtype}"]
        out = tmp_path / f"{contract}.safetensors"
        words = ["grad", str(runs.config), *settings, "--trajectories", str(recorded), "--out", str(out)]
        assert main(words) == 0
        said[contract] = json.loads(capsys.readouterr().out.splitlines()[-1])
        tensors = load_file(out)
        assert all(tensor.dtype == DTYPES[dtype] for tensor in tensors.values())
        held = said[contract]["bytes"]
        assert held["output"] == max(tensor.nbytes for tensor in tensors.values())
        arch = read_architecture(runs.model)
        with runtime_scope(Layout()) as runtime:
            model = build_meta_model(arch, runtime, DTYPES[dtype])
            assert held["output"] == gradient_file_bytes(model, arch, DTYPES[dtype])
        assert held["run"] > 0 and held["replay"] > 0
    assert all((line["tokens"], line["responses"]) == (5, 2) for line in said.values())
    assert all(isinstance(line["loss"], float) for line in said.values())
    assert "truncate_tokens" not in said["exact"] and said["truncated"]["truncate_tokens"] == 5
