"""Two ways to run a recurrent layer over context-parallel ranks: heads exchanged, or the state handed over.

    heads      all-to-all: each rank gets all new tokens of 1/cp of the heads; all ranks compute at once
    handover   each rank keeps its tokens and waits for the state behind its neighbour's; ranks compute one after
               another (the backward runs the other way round)

Run under torchrun; the model takes `heads` (layers/gdn/module.py). Times are of forward and backward of the
delta rule alone, interleaved, median of the repeats; bytes are what one rank sends in both directions.

Legend: t tokens of this rank, T of all; n key heads, h value heads, k and v head dims.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.layers.gdn.delta_rule import gated_delta_rule
from megatron_lrl.runtime import init_distributed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="new tokens of all ranks")
    parser.add_argument("--key-heads", type=int, default=4, metavar="N")
    parser.add_argument("--value-heads", type=int, default=8, metavar="N")
    parser.add_argument("--dim", type=int, default=64, metavar="N", help="key and value head dim")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    options = parser.parse_args()
    world = init_distributed()
    size, rank = world.world_size, world.rank
    if options.tokens % size or options.key_heads % size or options.value_heads % options.key_heads:
        parser.error("ranks must divide --tokens and --key-heads, and --key-heads must divide --value-heads")
    inputs = make_inputs(options, rank, options.tokens // size, world.device)
    ways: dict[str, Callable[..., Tensor]] = {"heads": heads, "handover": handover}
    outputs = {name: way(*inputs).detach() for name, way in ways.items()}
    difference = (outputs["heads"] - outputs["handover"]).norm() / outputs["handover"].norm()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way(*inputs).sum().backward()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        t, per_token = options.tokens // size, sum(x[0, 0].numel() for x in inputs) + inputs[2][0, 0].numel()
        sent = {
            "heads": 2 * t * per_token * 4 * (size - 1) / size,
            "handover": 2 * options.value_heads * options.dim**2 * 4,
        }
        print(f"{size} ranks, T = {options.tokens}; outputs differ by {float(difference):.1e} relative L2")
        for name in ways:
            print(
                f"{name:9} {statistics.median(seconds[name]):8.3f} s   {sent[name] / 2**20:8.2f} MiB sent a rank"
            )
        ratio = statistics.median(seconds["handover"]) / statistics.median(seconds["heads"])
        print(f"handover / heads: {ratio:.2f}")
    dist.destroy_process_group()


def make_inputs(options: argparse.Namespace, rank: int, tokens: int, device: torch.device) -> list[Tensor]:
    """q k v g beta of this rank's tokens, all heads, as leaves."""
    draw = torch.Generator().manual_seed(rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    n, h, d = options.key_heads, options.value_heads, options.dim
    q, k, v = normal(1, tokens, n, d), normal(1, tokens, n, d), normal(1, tokens, h, d)
    g, beta = -0.1 * normal(1, tokens, h).exp(), normal(1, tokens, h).sigmoid()
    return [x.to(device).requires_grad_() for x in (q, k, v, g, beta)]


def zero_state(k_btnk: Tensor, v_bthv: Tensor) -> Tensor:
    return v_bthv.new_zeros(1, v_bthv.shape[2], k_btnk.shape[3], v_bthv.shape[3])


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts along the first axis; its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return _Exchange.apply(dx.contiguous())


def heads(*inputs: Tensor) -> Tensor:
    """Returns [1, t, h, v]."""
    size = dist.get_world_size()

    def to_heads(x: Tensor) -> Tensor:
        """[1, t, heads, ...] -> [1, T, heads / cp, ...]"""
        parts = x[0].unflatten(1, (size, -1)).transpose(0, 1).contiguous()
        return _Exchange.apply(parts).flatten(0, 1).unsqueeze(0)

    q, k, v, g, beta = (to_heads(x) for x in inputs)
    out, _ = gated_delta_rule(q, k, v, g, beta, zero_state(k, v))
    back = _Exchange.apply(out[0].unflatten(0, (size, -1)).contiguous())  # [cp, t, heads / cp, v]
    return back.transpose(0, 1).flatten(1, 2).unsqueeze(0)


class _Handover(torch.autograd.Function):
    """The state behind the previous rank's tokens; in the backward its gradient goes back to that rank."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, state: Tensor) -> Tensor:
        if dist.get_rank():
            state = torch.empty_like(state)
            dist.recv(state, src=dist.get_rank() - 1)
        return state

    @staticmethod
    def backward(ctx: Any, dstate: Tensor) -> tuple[None, None]:
        if dist.get_rank():
            dist.send(dstate.contiguous(), dst=dist.get_rank() - 1)
        return None, None


class _PassOn(torch.autograd.Function):
    """Hand the state to the next rank; its gradient comes back in the backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, state: Tensor) -> Tensor:
        ctx.like = state
        if dist.get_rank() < dist.get_world_size() - 1:
            dist.send(state.contiguous(), dst=dist.get_rank() + 1)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        dstate = torch.zeros_like(ctx.like)
        if dist.get_rank() < dist.get_world_size() - 1:
            dist.recv(dstate, src=dist.get_rank() + 1)
        return dout, dstate


def handover(*inputs: Tensor) -> Tensor:
    """Returns [1, t, h, v]."""
    q, k, v, g, beta = inputs
    state = _Handover.apply(q, zero_state(k, v))
    out, state = gated_delta_rule(q, k, v, g, beta, state)
    return _PassOn.apply(out, state)


if __name__ == "__main__":
    main()
