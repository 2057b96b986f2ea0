"""Claim: flash-linear-attention's kernels are called as they are declared, with inputs that they take, and only for
what they compute in the precision asked for; what they are called with is the same delta rule.

Why the test shows it: stand-ins with the declarations of fla-core 0.6.0 (names and order of parameters) check shapes,
dtypes and heads as the kernels do, and compute the rule's definition without its normalisation, in float64: keys and
queries have to arrive at unit length, and the query's scale is theirs. Results and gradients are compared with
ours. Where the package is installed, its own declarations are compared with the stand-ins'.
Not shown: the kernels themselves (`attention/test_kernels_gpu.py`, with the package).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lrl.layers.gdn import delta_rule

CALLS: list[str] = []


def definition(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule for keys of any length, in float64."""
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == (*g.shape,) == (*beta.shape,), (
        "one key head a value head"
    )
    assert q.dtype == k.dtype == v.dtype and g.dtype == state.dtype == torch.float32
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert state.shape == (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    dtype = v.dtype
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        write = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(dtype), state.float()


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Any = None, cu_seqlens_cpu: Any = None, chunk_indices: Any = None, cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert output_final_state and initial_state is not None and scale is None and not kwargs
    CALLS.append("chunk")
    return definition(q, k, v, g, beta, initial_state)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Any = None, gv: Any = None, beta: Any = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, A_log: Any = None, dt_bias: Any = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Any = None, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert (
        output_final_state and initial_state is not None and g is not None and gk is gv is None and not kwargs
    )
    assert not torch.is_grad_enabled(), "this kernel has no backward"
    CALLS.append("fused_recurrent")
    return definition(q, k, v, g, beta, initial_state)


STAND_INS = (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The function that calls the kernels, which are the stand-ins."""
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    for stand_in in STAND_INS:
        setattr(module, stand_in.__name__, stand_in)
    delta_rule._fla.cache_clear()
    CALLS.clear()
    yield delta_rule._fla()
    delta_rule._fla.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "grad", "kernel"), [(1, False, "fused_recurrent"), (1, True, "chunk"), (7, False, "chunk")]
)
def test_the_kernels_compute_our_delta_rule(fla: Any, tokens: int, grad: bool, kernel: str) -> None:
    make = torch.Generator().manual_seed(tokens)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=make).to(dtype).requires_grad_(grad)

    b, n, h, k, v = 2, 2, 6, 16, 8
    q, key, value = draw(b, tokens, n, k), draw(b, tokens, n, k), draw(b, tokens, h, v)
    g = (-torch.rand(b, tokens, h, generator=make)).requires_grad_(grad)
    beta = torch.rand(b, tokens, h, generator=make).to(torch.bfloat16).requires_grad_(grad)
    # As `Snapshot.rows` shares one row between branches.
    row = torch.randn(1, h, k, v, generator=make).requires_grad_(grad)
    inputs = (q, key, value, g, beta)
    found, expected = [], []
    for rule, results in ((fla, found), (delta_rule.gated_delta_rule, expected)):
        with torch.set_grad_enabled(grad):
            out, state = rule(*inputs, row.expand(b, -1, -1, -1))
        assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
        results += [out, state]
        if grad:
            (out.float().square().sum() + state.square().sum()).backward()
            results += [x.grad for x in (*inputs, row)]
            for x in (*inputs, row):
                x.grad = None
    assert [kernel] == CALLS
    for ours, theirs in zip(expected, found, strict=True):
        ours, theirs = ours.detach().float(), theirs.detach().float()
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2, "bfloat16's rounding"


def test_they_are_asked_only_for_what_they_compute_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda(torch.Tensor):
        is_cuda = True

    def takes(dtype: torch.dtype, state: torch.dtype = torch.float32, key_dim: int = 16) -> bool:
        x = torch.zeros(1, 2, 1, key_dim, dtype=dtype).as_subclass(Cuda)
        return delta_rule._fla_takes(x, x, torch.zeros(1, 1, key_dim, key_dim, dtype=state))

    assert takes(torch.bfloat16) and takes(torch.float16, key_dim=256)
    assert not takes(torch.float32), "older kernels refuse it, newer ones multiply in TensorFloat-32"
    assert not takes(torch.float64, torch.float64)
    assert not takes(torch.bfloat16, key_dim=264)
    x = torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16)
    assert not delta_rule._fla_takes(x, x, torch.zeros(1, 1, 16, 16)), "on the CPU"


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda function: function.__name__)
def test_the_stand_ins_are_declared_as_the_kernels(stand_in: Any) -> None:
    import fla.ops.gated_delta_rule as installed

    theirs = inspect.signature(getattr(installed, stand_in.__name__)).parameters
    used = ["q", "k", "v", "g", "beta", "initial_state", "output_final_state"]
    assert list(theirs)[:4] == used[:4] and all(name in theirs for name in used)
    positional = [list(p).index("beta") for p in (theirs, inspect.signature(stand_in).parameters)]
    assert positional[0] == positional[1]
