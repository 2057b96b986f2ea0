"""Claim: the aten operators behind `kernels` on CUDA have the signatures that we call, are chosen for half precision,
give shapes and dtypes as `kernels` promises, and what they do not take goes to tiles; the tiles are right.

Why the tests show it: torch's own schemas are compared with the text that the code was written for, so that an upgrade
that changes one fails here and not on a GPU; torch's shape functions run the real code on fake CUDA tensors. Tiles
compute on the CPU, against the dense reference in float64, with one key a tile, a part of a tile and all at once.
Not shown: the numbers of the CUDA kernels (the `gpu` tests of test_kernels and test_kernels_gpu).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import dense_attention as reference
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lrl.layers.softmax import kernels, tiled
from megatron_lrl.precision import accumulate_dtype

SCHEMAS = {
    "_scaled_dot_product_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
        "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
        "Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_signatures_are_those_that_we_call(name: str) -> None:
    assert str(getattr(torch.ops.aten, name).default._schema) == f"aten::{name}{SCHEMAS[name]}"


class Called(TorchDispatchMode):
    """Names of the flash operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash" in str(func):
            self.names.append(func._schema.name.removeprefix("aten::_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


FLASH = ["flash_attention", "flash_attention_backward", "flash_attention_backward"]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "expected"),
    [
        (torch.bfloat16, 64, (9, 0), FLASH),
        (torch.float16, 256, (8, 0), FLASH),
        (torch.bfloat16, 128, (7, 5), []),  # Turing: no flash kernel
        (torch.bfloat16, 20, (9, 0), []),  # no multiple of 8
        (torch.bfloat16, 264, (9, 0), []),
        (torch.float32, 64, (9, 0), []),
        (torch.float64, 64, (9, 0), []),
    ],
)
@pytest.mark.parametrize(("s", "t", "causal"), [(33, 65, False), (1, 7, False), (17, 17, True)])
def test_cuda_tensors_reach_the_kernel_that_takes_them(
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    expected: list[str],
    s: int,
    t: int,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("zeros", "ones", "empty", "full", "tensor", "empty_like"):
        # Where another test installed the CPU platform, factories read "cuda" as "cpu".
        monkeypatch.setattr(torch, name, getattr(getattr(torch, name), "__wrapped__", getattr(torch, name)))
    monkeypatch.setattr(kernels, "_ampere", lambda _: capability >= (8, 0))
    wide = accumulate_dtype(dtype)
    with FakeTensorMode(), Called() as called:
        q = torch.empty(2, 3, s, head_dim, dtype=dtype, device="cuda")
        k = torch.empty(2, 1, t, head_dim, dtype=dtype, device="cuda").expand(-1, 3, -1, -1)
        o, lse = kernels.attend(q, k, k, causal, 0.1)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, dtype, q.shape[:3], wide)
        dq, dk, dv = kernels.attend_backward(q, q, k, k, o, lse, causal, 0.1)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)
        assert {x.dtype for x in (dq, dk, dv)} == {dtype}
        constant = kernels.constant_backward(q, q, k, k, o, lse, 0.1)
        assert (constant.shape, constant.dtype) == (q.shape, wide)
        assert {x.device.type for x in (o, lse, dq, dk, dv, constant)} == {"cuda"}
    assert called.names == expected


@pytest.mark.parametrize("tile", [1, 5, 64])
@pytest.mark.parametrize(("s", "t", "causal"), [(17, 17, True), (1, 1, True), (3, 65, False), (5, 1, False)])
@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)]
)
def test_tiles_equal_the_reference(
    dtype: torch.dtype, bar: float, s: int, t: int, causal: bool, tile: int
) -> None:
    make = torch.Generator().manual_seed(s * t)

    def draw(heads: int, length: int) -> torch.Tensor:
        return torch.randn(2, heads, length, 12, generator=make, dtype=torch.float64).to(dtype)

    q, do = draw(3, s), draw(3, s)
    k, v = (draw(1, t).expand(-1, 3, -1, -1) for _ in range(2))
    exact = [x.double() for x in (do, q, k, v)]
    o, lse = reference.attend(*exact[1:], causal, 0.3)
    found, found_lse = tiled.attend(q, k, v, causal, 0.3, tile)
    # As if other segments had been merged in: the backward must take what it is given.
    merged_lse = lse + 0.5
    theirs = reference.attend_backward(*exact, o, merged_lse, causal, 0.3)
    ours = tiled.attend_backward(do, q, k, v, o.to(dtype), merged_lse.to(found_lse.dtype), causal, 0.3, tile)
    assert found.dtype == dtype and found_lse.dtype == accumulate_dtype(dtype)
    floor = float(do.double().norm())  # where a query sees one key only, dq and dk are zero
    for name, mine, other in zip(
        ("o", "lse", "dq", "dk", "dv"), (found, found_lse, *ours), (o, lse, *theirs), strict=True
    ):
        error = float((mine.double() - other).norm()) / max(
            float(other.norm()), floor * (name in ("dq", "dk"))
        )
        assert error <= bar, f"{name}: relative L2 {error:.2e}"
