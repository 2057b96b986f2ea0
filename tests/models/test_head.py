"""Claim: chunked, vocabulary-parallel log-probabilities and entropies equal torch's log_softmax, and so do
their gradients; rows that pad the vocabulary have neither probability nor gradient.

Why the tests show it: the oracle is log_softmax over the true vocabulary with plain autograd, in float64
(1e-12) and against float32 rounding; chunks of 1, of primes and larger than the rows; a vocabulary of a
prime size padded for tp; padding rows hold huge weights, so that a leak of probability cannot be missed.
Under tp = 2 each rank's shard is compared with its rows of the oracle.

Not shown: bfloat16 logits (their rounding is the matrix product's own), sequence parallelism
(tests/worlds).

Legend: n rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, run_world
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lrl.config import load_config
from megatron_lrl.models import head
from megatron_lrl.models.head import gather_logits, local_logits, policy_logprobs

V, H = 131, 16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


class Alone:
    """The tensor-parallel group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def inputs(n: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, H, generator=make, dtype=torch.float64)
    weight = torch.randn(padded, H, generator=make, dtype=torch.float64)
    weight[V:] = 50.0
    target = torch.randint(V, (n,), generator=make)
    if n:
        target[0], target[-1] = 0, V - 1  # the first and the last row of the vocabulary
    upstream = torch.randn(n, generator=make, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), target, upstream.to(dtype)


def oracle(
    hidden: Tensor, weight: Tensor, target: Tensor, upstream: Tensor, temperature: float
) -> dict[str, Tensor]:
    hidden, weight = (x.to(torch.float64, copy=True).requires_grad_() for x in (hidden, weight))
    table = torch.log_softmax(hidden @ weight[:V].t() / temperature, dim=-1)
    logprob = table.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    (logprob * upstream.double()).sum().backward()
    entropy = -(table.exp() * table).sum(-1)
    return {"logprob": logprob, "entropy": entropy, "dhidden": hidden.grad, "dweight": weight.grad}


def ours(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    upstream: Tensor,
    temperature: float,
    chunk: int,
    group: Any,
) -> dict[str, Tensor]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    logprob, entropy = policy_logprobs(
        hidden, weight, target, vocab_size=V, temperature=temperature, tp_group=group, chunk=chunk
    )
    assert not entropy.requires_grad
    (logprob * upstream).sum().backward()
    return {"logprob": logprob, "entropy": entropy, "dhidden": hidden.grad, "dweight": weight.grad}


def check(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, value in found.items():
        assert value.dtype == dtype, name
        error = float((value.detach().double() - expected[name].detach()).norm())
        bar = TOLERANCE[dtype] * max(1.0, float(expected[name].detach().norm()))
        assert error <= bar, f"{name}: {error:.2e}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("n", "chunk"), [(1, 1), (7, 1), (7, 3), (7, 7), (7, 100), (64, 63)])
@pytest.mark.parametrize("padded", [V, V + 5])
def test_equals_log_softmax(dtype: torch.dtype, temperature: float, n: int, chunk: int, padded: int) -> None:
    case = inputs(n, padded, dtype)
    found = ours(*case, temperature, chunk, Alone())
    check(found, oracle(*case, temperature), dtype)
    assert not found["dweight"][V:].any()


def test_no_rows_take_part_with_zero_gradients() -> None:
    hidden, weight, target, upstream = inputs(0, V, torch.float32)
    found = ours(hidden, weight, target, upstream, 1.0, 8, Alone())
    assert found["logprob"].shape == (0,)
    assert found["dhidden"].shape == (0, H)
    assert found["dweight"].shape == (V, H)
    assert not found["dweight"].any()


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made and that still live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.live:
                storage = x.untyped_storage()
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_logits_stay_within_their_budget(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 rows of 4,099 columns take 16 MB as float32; a budget of 2 MiB holds for all that exists at once."""
    monkeypatch.setattr(head, "LOGITS_BYTES", 2**21)
    config = load_config(os.devnull, ["model.hf=unused", f"model.dtype={dtype}"])
    rows = head.logits_rows(config, 4099, 1)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    hidden, weight = torch.randn(1000, 2).to(torch_dtype), torch.randn(4099, 2).to(torch_dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    with LiveBytes() as bytes_:
        logprob, _ = policy_logprobs(
            hidden, weight, torch.zeros(1000, dtype=torch.long),
            vocab_size=4099, temperature=1.0, tp_group=Alone(), chunk=rows,
        )  # fmt: skip
        logprob.sum().backward()
    small = 8 * (4 * 1000 + 4 * 4099 * 2)  # what is as long as the rows, and the weight's gradient
    assert 2**20 < bytes_.peak < 2**21 + small


def test_a_chosen_chunk_stays() -> None:
    assert (
        head.logits_rows(load_config(os.devnull, ["model.hf=unused", "replay.logits_chunk=5"]), 151936, 1)
        == 5
    )
    auto = load_config(os.devnull, ["model.hf=unused"])
    assert head.logits_rows(auto, 151936, 1) == 73  # 2^27 / (3 x 4 x 151,936)
    assert head.logits_rows(auto, 151936, 8) == 588


def test_extreme_logits_stay_finite() -> None:
    """A row whose best token is far ahead: log-probabilities of 0 and -2e4, entropy 0, finite gradients."""
    hidden, weight = torch.zeros(2, H), torch.zeros(V, H)
    hidden[:, 0], weight[3, 0] = 100.0, 200.0
    found = ours(hidden, weight, torch.tensor([3, 4]), torch.ones(2), 1.0, 1, Alone())
    assert found["logprob"].tolist() == [0.0, -20000.0]
    assert found["entropy"].tolist() == [0.0, 0.0]
    assert all(bool(torch.isfinite(value).all()) for value in found.values())


def tp_cases(world: World, chunks: list[int]) -> list[dict[str, Tensor]]:
    """One rank of tp: its shard's results for every chunk size, and the gathered logits."""
    dist.init_process_group("gloo")
    group, results = dist.group.WORLD, []
    padded = V + (-V) % world.tp
    for chunk in chunks:
        hidden, weight, target, upstream = inputs(11, padded, torch.float64)
        shard = weight.chunk(world.tp)[dist.get_rank()]
        found = ours(hidden, shard, target, upstream, 0.7, chunk, group)
        # What `all_rows` does to the hidden states' gradient under tensor parallelism.
        dist.all_reduce(found["dhidden"])
        logits = local_logits(hidden, shard, V, dist.get_rank(), 0.7)
        found["logits"] = gather_logits(logits, V, group)
        results.append({name: value.detach() for name, value in found.items()})
    return results


def test_equals_log_softmax_over_two_vocabulary_shards() -> None:
    hidden, weight, target, upstream = inputs(11, V + 1, torch.float64)
    expected = oracle(hidden, weight, target, upstream, 0.7)
    expected["logits"] = hidden @ weight[:V].t() / 0.7
    for rank, results in enumerate(run_world(World(tp=2), "models.test_head:tp_cases", chunks=[1, 4, 11])):
        mine = dict(expected, dweight=expected["dweight"].chunk(2)[rank])
        for found in results:
            check(found, mine, torch.float64)
