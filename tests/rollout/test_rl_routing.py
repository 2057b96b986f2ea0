"""Claim: a recorded routing survives JSON exactly, and a record that does not fit its response or model is refused by
file, line and field.

Why the tests show it: random records go through trajectories and the journal's reader and come back equal, bit by bit
in both dtypes; each malformed record changes one thing of a valid one.
Not shown: what a record means to a model (`tests/worlds/test_recorded_routing.py`).
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lrl.errors import UserError
from megatron_lrl.experts.record import Routing, RoutingShape
from megatron_lrl.rollout.data import Limits, group_record, read_trajectories, write_trajectories
from megatron_lrl.rollout.types import Group, Response

LAYERS, EXPERTS, TOP_K = (1, 3), 300, 2
LIMITS = Limits(50, 100, RoutingShape(LAYERS, EXPERTS, TOP_K))


def record(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Routing:
    draw = torch.Generator().manual_seed(seed)
    expert_RLk = torch.stack(
        [torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(tokens * len(LAYERS))]
    ).view(tokens, len(LAYERS), TOP_K)
    return Routing.of(LAYERS, expert_RLk, torch.rand(expert_RLk.shape, generator=draw, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_record_comes_back_bit_equal(dtype: torch.dtype, tmp_path: Path) -> None:
    responses = (*(Response((1,) * n, routing=record(n, dtype, n)) for n in (1, 4)), Response((2,)))
    group = Group("g", (1, 2), responses)
    write_trajectories(tmp_path / "t.jsonl", [group])
    (again,) = read_trajectories(tmp_path / "t.jsonl", LIMITS)
    assert again == group and "routing" not in group_record(group)["responses"][2]
    of_json = Routing.from_json(json.loads(json.dumps(responses[1].routing.to_json())))
    assert of_json == responses[1].routing
    expert_RLk, weight_RLk = of_json.tensors()
    assert expert_RLk.shape == (4, 2, 2) and weight_RLk.dtype == dtype
    assert torch.equal(weight_RLk, record(4, dtype, 4).tensors()[1]) and int(expert_RLk.max()) > 127
    for found, all_rows in zip(of_json.rows(1, 2).tensors(), of_json.tensors(), strict=True):
        assert torch.equal(found, all_rows[1:3])


def encoded(values: Any, kind: str) -> str:
    import numpy as np

    return base64.b64encode(np.asarray(values, kind).tobytes()).decode()


WRONG = {
    "key": ({"extra": 1}, "exactly the keys"),
    "layers": ({"layers": [1, 2]}, "has layers [1, 2]"),
    "top_k": ({"top_k": 3}, "top_k 3"),
    "dtype": ({"dtype": "float16"}, "dtype = 'float16'"),
    "no dtype": ({"dtype": ["float32"]}, "dtype = ['float32']"),
    "base64": ({"experts": "%%"}, "experts is not base64"),
    "length": (
        {"weights": encoded([0.5] * 3, "<f4")},
        "weights holds 12 bytes; 1 tokens of this model take 16",
    ),
    "range": ({"experts": encoded([0, 1, 2, 300], "<i2")}, "outside 0 to 299"),
    "negative": ({"experts": encoded([0, 1, 2, -1], "<i2")}, "outside 0 to 299"),
    "twice": ({"experts": encoded([0, 1, 2, 2], "<i2")}, "twice for one token"),
    "weight": ({"weights": encoded([0.5, 0.5, -0.5, 0.5], "<f4")}, "must be at least 0"),
    "finite": ({"weights": encoded([0.5, 0.5, 0.5, float("nan")], "<f4")}, "must be finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    group = group_record(Group("g", (1,), (Response((1,), routing=record(1)),)))
    group["responses"][0]["routing"] |= change
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(group) + "\n")
    with pytest.raises(UserError, match=r"t\.jsonl:1: responses\[0\]: \"routing\"") as raised:
        list(read_trajectories(path, LIMITS))
    assert message in str(raised.value)


def test_a_dense_model_has_no_routing(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "t.jsonl", [Group("g", (1,), (Response((1,), routing=record(1)),))])
    with pytest.raises(UserError, match="the model is dense"):
        list(read_trajectories(tmp_path / "t.jsonl", replace(LIMITS, routing=None)))
