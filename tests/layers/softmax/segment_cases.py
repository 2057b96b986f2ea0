"""Cases of segment attention, and their comparison with `dense_attention` over all keys at once.

A rank builds every rank's tensors from one seed, runs segment attention on its own, and compares its slice.

Legend: N new tokens of all branches, m this rank's slots, t all keys; H query heads, h KV heads, d head dim.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import World
from oracle.dense_attention import dense_attention
from torch import Tensor

from megatron_lrl.layers.layout import TokenLayout
from megatron_lrl.layers.softmax.segment import Adjoint, Block, segment_attention
from megatron_lrl.precision import accumulate_dtype

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FILL = 2.0**-6
"""What adjoint buffers hold beforehand: near the gradients' size, so that it costs them no digits."""


@dataclass(frozen=True)
class Case:
    """Plain values only, so that it travels to a rank."""

    lengths: list[int]
    # Of each rank, [shared, first branch, branches, tokens, "constant" | "adjoint" | "live"]. Ranks beyond the list
    # own nothing.
    blocks: list[list[list[Any]]]
    heads: int = 4
    kv_heads: int = 2
    dtype: str = "float64"
    multiple: int = 1
    seed: int = 0
    head_dim: int = 8
    device: str = "cpu"  # of ours; the oracle stays on the CPU

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def shared(tokens: int, mode: str = "constant") -> list[Any]:
    return [True, 0, 1, tokens, mode]


def own(branch: int, branches: int, tokens: int, mode: str = "constant") -> list[Any]:
    return [False, branch, branches, tokens, mode]


def errors(case: Case, cp: int = 1, rank: int = 0, group: Any = None) -> dict[str, float]:
    """Relative L2 of everything this rank computes: o, dq, dk, dv, and each block's gradient by its mode."""
    d, dtype, device = case.head_dim, DTYPES[case.dtype], case.device
    make = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64).to(dtype)

    layout = TokenLayout(
        tuple(1 + i for i in range(len(case.lengths))), tuple(case.lengths), cp, rank, case.multiple
    )
    q_NHd, k_Nhd, v_Nhd = (draw(layout.tokens, h, d) for h in (case.heads, case.kv_heads, case.kv_heads))
    weight_MHd = draw(layout.padded, case.heads, d)
    specs = [case.blocks[r] if r < len(case.blocks) else [] for r in range(cp)]
    resident = [
        [(draw(b, case.kv_heads, t, d), draw(b, case.kv_heads, t, d)) for _, _, b, t, _ in row]
        for row in specs
    ]
    oracle = dense(case, layout, (q_NHd, k_Nhd, v_Nhd), weight_MHd[: layout.tokens], specs, resident)

    mine_of = [layout.slice_local(x, fill=3.0).to(device) for x in (q_NHd, k_Nhd, v_Nhd)]
    leaves = [x.detach().requires_grad_() for x in mine_of]
    blocks = []
    for (is_shared, branch, _, _, mode), (k, v) in zip(specs[rank], resident[rank], strict=True):
        adjoint, k, v = None, k.to(device), v.to(device)
        if mode == "adjoint":  # filled, so that an overwrite instead of an addition shows
            adjoint = Adjoint(*(torch.full_like(x, FILL, dtype=accumulate_dtype(dtype)) for x in (k, v)))
        live = mode == "live"
        k, v = (x.clone().requires_grad_(live) for x in (k, v))
        blocks.append(Block(k, v, is_shared, branch, adjoint))
    o_mHd = segment_attention(*leaves, layout, blocks, d**-0.5, group)
    mine = slice(layout.local_start, layout.local_start + layout.local_slots)
    (o_mHd * weight_MHd[mine].to(device)).sum().backward()

    n = layout.local_tokens
    assert o_mHd.dtype == dtype
    assert not o_mHd[n:].any(), "padding has no output"
    assert not any(leaf.grad[n:].any() for leaf in leaves), "padding has no gradient"
    real = slice(layout.local_start, layout.local_start + n)
    found = {"o": distance(o_mHd[:n], oracle["o"][real], oracle["o"])}
    for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
        found[name] = distance(leaf.grad[:n], oracle[name][real], oracle[name])
    for i, block in enumerate(blocks):
        dk, dv = oracle[f"block{rank}.{i}"]
        if block.adjoint is not None:
            ours = [block.adjoint.dk_bhtd - FILL, block.adjoint.dv_bhtd - FILL]
        elif block.live:
            ours = [block.k_bhtd.grad, block.v_bhtd.grad]
        else:
            assert block.k_bhtd.grad is None
            continue
        for which, part, whole in (("dk", ours[0], dk), ("dv", ours[1], dv)):
            found[f"block{i}.{which}"] = distance(part, whole, whole)
    return found


def dense(
    case: Case,
    layout: TokenLayout,
    new: tuple[Tensor, ...],
    weight_NHd: Tensor,
    specs: list[list[list[Any]]],
    resident: list[list[tuple[Tensor, Tensor]]],
) -> dict[str, Any]:
    """The whole advance in float64: output and gradients of all new tokens and of all ranks' blocks."""
    q, k, v = (leaf(x) for x in new)
    blocks = [[(leaf(bk), leaf(bv)) for bk, bv in row] for row in resident]
    keys, values, k_branch, k_position = [], [], [], []
    for row, shapes in zip(blocks, specs, strict=True):
        for (bk, bv), (is_shared, branch, branches, tokens, _) in zip(row, shapes, strict=True):
            keys.append(bk.transpose(1, 2).flatten(0, 1))
            values.append(bv.transpose(1, 2).flatten(0, 1))
            for i in range(branches):
                k_branch += [-1 if is_shared else branch + i] * tokens
            k_position += [0] * (branches * tokens)
    q_branch = [i for i, length in enumerate(layout.lengths) for _ in range(length)]
    q_position = [layout.starts[i] + j for i, length in enumerate(layout.lengths) for j in range(length)]
    o = dense_attention(
        q,
        torch.cat([*keys, k]),
        torch.cat([*values, v]),
        torch.tensor(q_position),
        torch.tensor(k_position + q_position),
        torch.tensor(q_branch),
        torch.tensor(k_branch + q_branch),
        q.shape[-1] ** -0.5,
    )
    (o * weight_NHd.double()).sum().backward()
    result: dict[str, Any] = {"o": o.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for r, row in enumerate(blocks):
        for i, pair in enumerate(row):
            result[f"block{r}.{i}"] = [torch.zeros_like(x) if x.grad is None else x.grad for x in pair]
    return result


def leaf(x: Tensor) -> Tensor:
    """A float64 copy that collects a gradient."""
    return x.to(torch.float64, copy=True).requires_grad_()


def distance(ours: Tensor, oracle: Tensor, whole: Tensor) -> float:
    """Norm of the difference over the norm of the oracle's whole tensor (1 where that is zero)."""
    assert ours.shape == oracle.shape
    scale = float(whole.norm()) if whole.numel() else 0.0
    return float((ours.detach().double().cpu() - oracle).norm()) / (scale or 1.0)


def run_cases(world: World, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Every case over the context-parallel ranks of a world of cp ranks."""
    dist.init_process_group("gloo")
    return [errors(Case(**case), world.cp, dist.get_rank(), dist.group.WORLD) for case in cases]
