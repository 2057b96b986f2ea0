"""Claim: the pretence refuses what CUDA, NCCL and the flash kernels refuse, records what makes the host wait, and lets
everything else through with the CPU's numbers.

Why the test shows it: each rule is broken once, on purpose, in a process of its own, and the answer is compared.
Not shown: rules of CUDA that the pretence does not know.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from harness.spawn import TESTS

RULES = """
import json
from cuda_audit import nccl, torch_cuda
pretence, rules = torch_cuda.install(1), nccl.install()
import torch
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
gloo = dist.new_group([0], backend="gloo")
x = torch.arange(12.0, device="cuda").view(3, 4)
half = torch.randn(2, 3, 5, 16, device="cuda", dtype=torch.bfloat16)
flash = torch.ops.aten._scaled_dot_product_flash_attention

def late():
    copy = x.to("cpu", non_blocking=True)
    return copy + 1

def in_time():
    copy = x.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    return copy + 1

def backward():
    w = torch.nn.Parameter(torch.ones(4, 2, device="cuda"))
    (x.split([1, 3], dim=1)[1] @ w[1:]).sum().backward()
    return w.grad

refused = {
    "mixed": lambda: x + torch.ones(4),
    "mixed_cat": lambda: torch.cat([x, torch.zeros(1, 4)]),
    "other_device": lambda: torch.zeros(2, device="cuda:0"),
    "numpy": lambda: x.numpy(),
    "generator": lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
    "late_copy": late,
    "nccl_cpu": lambda: dist.all_reduce(torch.ones(2)),
    "nccl_strided": lambda: dist.all_reduce(x.t()),
    "nccl_int16": lambda: dist.all_reduce(torch.ones(2, device="cuda", dtype=torch.int16)),
    "gloo_cuda": lambda: dist.all_reduce(x, group=gloo),
    "flash_float32": lambda: flash(half.float(), half.float(), half.float(), 0.0, False, scale=0.1),
    "flash_head_dim": lambda: flash(half[..., :12], half[..., :12], half[..., :12], 0.0, False, scale=0.1),
    "flash_heads": lambda: flash(half, half[:, :1], half[:, :1], 0.0, False, scale=0.1),
    "flash_misaligned": lambda: flash(*(half.as_strided((2, 1, 3, 16), (240, 80, 16, 1), 4),) * 3, scale=0.1),
}
allowed = {
    "scalar": lambda: x + torch.tensor(1.0),
    "like": lambda: torch.zeros_like(x),
    "moved": lambda: torch.ones(4).to("cuda", non_blocking=True) + x,
    "in_time": in_time,
    "backward": backward,
    "reduced": lambda: dist.all_reduce(x.clone()),
    "gloo": lambda: dist.all_reduce(torch.ones(2), group=gloo),
    "einsum": lambda: torch.einsum("ij,kj->ik", x, x),
    "parameter": lambda: torch.nn.Linear(4, 2).to("cuda:1")(x),
    "flash": lambda: flash(half, half[:, :1].expand_as(half), half, 0.0, False, scale=0.1),
}
waits = {
    "item": lambda: x.sum().item(), "bool": lambda: bool(x.sum() > 0), "cpu": lambda: x.cpu(),
    "tolist": lambda: x.tolist(), "from_host": lambda: torch.tensor([1, 2], device="cuda"),
    "mask": lambda: x[x > 3], "nonzero": lambda: x.nonzero(), "none": lambda: (x * 2).sum(),
    "asynchronous": lambda: torch.ones(3).to("cuda", non_blocking=True),
    "object": lambda: dist.all_gather_object([None], 1),
}
found = {"refused": {}, "allowed": {}, "waits": {}}
for name, action in refused.items():
    try:
        action()
        found["refused"][name] = "let through"
    except Exception as error:
        found["refused"][name] = str(error).splitlines()[0]
for name, action in allowed.items():
    result = action()
    found["allowed"][name] = None if result is None else str(getattr(result, "device", None))
for name, action in waits.items():
    before = sum(pretence.waits.values())
    action()
    found["waits"][name] = sum(pretence.waits.values()) - before
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, object]]:
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", RULES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.split("FOUND")[1])


REFUSALS = {
    "mixed": "expected all tensors to be on the same device",
    "mixed_cat": "expected all tensors to be on the same device",
    "other_device": "this rank is on cuda:1",
    "numpy": "can't convert",
    "generator": "a CPU generator for a CUDA tensor",
    "late_copy": "did not block, and nothing waited",
    "nccl_cpu": "no backend for a CPU tensor",
    "nccl_strided": "must be contiguous",
    "nccl_int16": "is not one of NCCL's",
    "gloo_cuda": "a CUDA tensor",
    "flash_float32": "only supports fp16 and bf16",
    "flash_head_dim": "multiple of 8",
    "flash_heads": "heads must be the query's",
    "flash_misaligned": "misaligned",
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_it_refuses(rule: str, found: dict[str, dict[str, object]]) -> None:
    assert REFUSALS[rule] in str(found["refused"][rule])


def test_it_lets_through(found: dict[str, dict[str, object]]) -> None:
    expected = dict.fromkeys(found["allowed"], "cuda:1") | {
        "reduced": None,
        "gloo": None,
        "in_time": "cpu",
        "flash": "None",
    }
    assert found["allowed"] == expected


def test_it_records_waits(found: dict[str, dict[str, object]]) -> None:
    expected = dict.fromkeys(found["waits"], 1) | {"none": 0, "asynchronous": 0}
    assert found["waits"] == expected
