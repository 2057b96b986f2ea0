"""Claim: what makes a plan quick changes no number: remembered shapes are those that kernels compute; LastKV chunks
extrapolated from few take what passes over all take; a search over millions of positions runs few and short passes.

Why the tests show it: operators that make, change and view tensors are called with and without the memo, and outputs
compared in size, strides, dtype, storage and aliasing; windows of many chunks are planned with extrapolation and
without, with responses and prompts that end anywhere in a chunk, on stages of one and two; tokens of all passes are
counted.

Not shown: seconds, which depend on the machine; that planned bytes are measured bytes (test_plan, test_plan_lastkv).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World
from oracle.tiny_models import make_hf_dir

from megatron_lrl.config import load_config
from megatron_lrl.lifetimes.open import read_model_architecture
from megatron_lrl.plan import graphs as plan_graphs
from megatron_lrl.plan.bytes import Work, open_plan_of_stage, stages_that_differ
from megatron_lrl.plan.memo import ShapeMemo
from megatron_lrl.plan.report import plan as report_of

aten = torch.ops.aten
CALLS: dict[str, Callable[[], tuple[Any, tuple, dict]]] = {
    "broadcast": lambda: (aten.add.Tensor, (meta(4, 1, 3), meta(5, 1)), {}),
    "integers times 1": lambda: (aten.mul.Scalar, (meta(4, dtype=torch.int64), 1), {}),
    "integers times 1.0": lambda: (aten.mul.Scalar, (meta(4, dtype=torch.int64), 1.0), {}),
    "permuted": lambda: (aten.exp.default, (meta(3, 4, 5).permute(2, 0, 1),), {}),
    "expanded": lambda: (aten.exp.default, (meta(3, 1).expand(3, 7),), {}),
    "list": lambda: (aten.cat.default, ([meta(2, 3), meta(5, 3)],), {}),
    "two outputs": lambda: (aten.max.dim, (meta(6, 4), 1), {}),
    "wider": lambda: (aten._to_copy.default, (meta(6, 4),), {"dtype": torch.float64}),
    "in place": lambda: (aten.add_.Tensor, (meta(4, 3), meta(3)), {}),
    "into out": lambda: (aten.logaddexp.out, (x := meta(4), meta(4)), {"out": x}),
    "view": lambda: (aten.view.default, (meta(4, 3), [12]), {}),
    "slice": lambda: (aten.slice.Tensor, (meta(9, 3), 0, 2, 5), {}),
    "transposed in place": lambda: (aten.t_.default, (meta(4, 3),), {}),
}  # fmt: skip


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def look(output: Any, args: tuple, kwargs: dict) -> list[tuple]:
    """What a plan, and autograd, can see of outputs."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return [
        (
            x.shape, x.stride(), x.dtype, x.storage_offset(), x.untyped_storage().nbytes(), x.device,
            [x is other for other in given],
            [x.untyped_storage()._cdata == other.untyped_storage()._cdata for other in given],
        )
        for x in ((output,) if isinstance(output, torch.Tensor) else output)
    ]  # fmt: skip


def test_remembered_shapes_are_computed_shapes() -> None:
    memo = ShapeMemo()
    for _ in range(3):  # the first call computes, the others remember; all calls share one memo
        for name, call in CALLS.items():
            (func, args, kwargs), (_, again, more) = call(), call()
            expected = look(func(*args, **kwargs), args, kwargs)
            assert look(memo.call(func, again, more), again, more) == expected, name


def test_real_tensors_are_computed() -> None:
    memo = ShapeMemo()
    for value in (1.0, 2.0):
        x = torch.full((3,), value)
        assert memo.call(aten.mul.Scalar, (x, 3), {}).tolist() == [3 * value] * 3
        assert memo.call(aten.add_.Tensor, (x, x), {}).tolist() == [2 * value] * 3


LONG = [
    ("exact", 90, 170, 2, 2), ("exact", 81, 113, 4, 1), ("truncated", 97, 160, 2, 1), ("response_only", 40, 161, 3, 2),
    ("conventional", 205, 13, 2, 2), ("conventional", 192, 150, 2, 1), ("conventional", 161, 16, 4, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    "world",
    [World(), pytest.param(World(cp=2, pp=2), marks=pytest.mark.slow)],
    ids=lambda world: world.name,
)
def test_extrapolated_chunks_take_what_all_of_them_take(
    world: World, session_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf_dir(session_dir / f"plan-speed-{world.name}", "qwen3", 3, layers=4)
    settings = [f"model.hf={hf}", "model.attention=lastkv", "lastkv.chunk_size=16", "prefix.chunk_size=24"]
    config = load_config("/dev/null", [*settings, "prefix.truncate_tokens=21", *world.overrides])
    found = {}
    for few in (plan_graphs._FEW_CHUNKS, 1_000):
        monkeypatch.setattr(plan_graphs, "_FEW_CHUNKS", few)
        for stage in stages_that_differ(world.pp):
            with open_plan_of_stage(config, read_model_architecture(config), world.size, stage) as plan:
                for contract, *work in LONG:
                    found[few, stage, contract, *work] = plan.bytes_of(Work(*work), contract)
    assert not gc.get_freeze_count(), "a rehearsal gives objects back to the collector"
    extrapolated = {key[1:]: value for key, value in found.items() if key[0] != 1_000}
    assert extrapolated == {key[1:]: value for key, value in found.items() if key[0] == 1_000}
    assert all(value.replay_graph > 0 for value in extrapolated.values())


def test_a_search_over_millions_of_positions_runs_short_passes(
    session_dir: Path, monkeypatch: pytest.MonkeyPatch, report: Any
) -> None:
    hf = make_hf_dir(session_dir / "plan-speed-long", "qwen3", 3, layers=2, max_positions=2**24)
    tokens = []
    measured = plan_graphs.Graphs._measured

    def counted(graphs: Any, kinds: Any, contract: str, work: Work) -> Any:
        tokens.append(work.prompt + work.response * work.at_once)
        return measured(graphs, kinds, contract, work)

    monkeypatch.setattr(plan_graphs.Graphs, "_measured", counted)
    config = load_config("/dev/null", [f"model.hf={hf}", "rollout.max_new_tokens=16"])
    text = report_of(config, prompt=30_000, budget=1.0)
    fits = {line.split()[1]: int(line.split()[2]) for line in text.splitlines() if "largest" in line}
    assert fits["P"] > 1_000_000
    assert fits["R"] > 30_000
    assert max(tokens) <= 8 * max(30_000, fits["R"]), (
        "nothing is passed through that is far beyond the answer"
    )
    assert len(tokens) < 80
    report("passes of a search over 2^24 positions", len(tokens))
