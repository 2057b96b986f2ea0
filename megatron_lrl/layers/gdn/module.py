"""Gated DeltaNet with resident state: Megatron-Core's layer, run from a given state to the next one.

    hidden ─ in_proj ─┬─ q k v b a ── heads over cp ── convolution ─ delta rule ── tokens over cp ─┐
                      │               (all-to-all)     tail, state in and out      (all-to-all)    ├─ norm ─ out_proj
                      └─ z ────────────────────────────────────────────────────────────────────────┘

Context parallelism exchanges heads: each rank gets all new tokens of 1 / cp of the heads, so nothing waits for a
neighbour's state, the load is even whatever the branches' lengths, and the resident state itself is split over cp. The
traffic grows with the new tokens, never with the prefix. (Handing the state over in sequence order would instead run
the ranks one after another.)

Legend: m this rank's new slots, M of all cp ranks; b branches, t tokens of the longest; c channels of q, k and v on
this rank (cx: after the exchange); n key heads, h value heads; k, v head dims; w kernel width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import common
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_lrl.layers.advance import AdvanceContext
from megatron_lrl.layers.gdn.convolution import causal_convolution
from megatron_lrl.layers.gdn.delta_rule import gated_delta_rule
from megatron_lrl.layers.gdn.state import DeltaNetLayer, Snapshot
from megatron_lrl.layers.layout import TokenLayout


class GatedRMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the value dim, with a plain weight; statistics in float32 (float64 for float64)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())


class ResidentGatedDeltaNet(GatedDeltaNet):
    """Megatron-Core's parameters and checkpoint format; our forward. Runs through `megatron_lrl.layers.advance`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        available = common.HAVE_FLA
        common.HAVE_FLA = True  # the constructor asks for kernels that this class replaces
        try:
            super().__init__(*args, **kwargs)
        finally:
            common.HAVE_FLA = available
        # exp and softplus of these set the decay of long sequences: they stay float32 in a bfloat16 model.
        for name in ("A_log", "dt_bias"):
            parameter = getattr(self, name)
            wide = torch.promote_types(parameter.dtype, torch.float32)
            if wide != parameter.dtype:
                replacement = torch.nn.Parameter(parameter.to(wide))
                replacement.tensor_model_parallel, replacement.partition_dim = True, 0  # type: ignore[attr-defined]
                setattr(self, name, replacement)
        cp, k, v = self.cp_size, self.key_head_dim, self.value_head_dim
        self.key_heads, self.value_heads = self.num_k_heads_local_tp // cp, self.num_v_heads_local_tp // cp
        # q k v b a of one rank after the exchange
        self._sections = (
            self.key_heads * k,
            self.key_heads * k,
            self.value_heads * v,
            *(self.value_heads,) * 2,
        )

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: AdvanceContext | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [m (/ tp), 1, H] -> the same shape, and no bias. Grows the advance's state of this layer."""
        if not isinstance(packed_seq_params, AdvanceContext):
            raise RuntimeError("the model runs only through megatron_lrl.layers.advance")
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        channels, heads = self.conv_dim_local_tp, self.num_v_heads_local_tp
        qkv_mc, z_m, ba_m = projected.split([channels, self.v_dim_local_tp, 2 * heads], dim=-1)
        out_Mhv = self._mix(*self._to_heads(qkv_mc, ba_m), packed_seq_params)
        out_mhv = self._to_tokens(out_Mhv.flatten(1)).view(z_m.shape[0], heads, self.value_head_dim)
        normed = self._norm(out_mhv, z_m.view_as(out_mhv)).flatten(1)
        return self.out_proj(normed.unsqueeze(1))

    def grow_state(self, normed_smh: Tensor, _angles: object, advance: AdvanceContext) -> None:
        """Grow the layer's state where nothing reads its output: it grows as the layer runs."""
        self(normed_smh, None, packed_seq_params=advance)

    def _mix(self, qkv_Mc: Tensor, ba_M: Tensor, advance: AdvanceContext) -> Tensor:
        """All new tokens of this rank's heads, branch by branch, from the layer's state on. Returns [M, h, v]."""
        slots, layout = qkv_Mc.shape[0], advance.layout
        weight_c1w, a_log_h, dt_bias_h = self._own_heads()
        wide = a_log_h.dtype
        b_Mh, a_Mh = ba_M.split(self.value_heads, dim=-1)
        g_Mh = -a_log_h.exp() * F.softplus(a_Mh.to(wide) + dt_bias_h)
        beta_Mh = b_Mh.sigmoid()

        lengths, branches = layout.lengths, len(layout.lengths)
        qkv_btc, g_bth, beta_bth = (_batched(x, layout) for x in (qkv_Mc, g_Mh, beta_Mh))
        layer = advance.state.layer(self.layer_number, DeltaNetLayer)
        shapes = (
            (branches, qkv_btc.shape[-1], self.conv_kernel_dim - 1),
            (branches, self.value_heads, self.key_head_dim, self.value_head_dim),
        )
        before = layer.read(qkv_Mc, branches, lambda: Snapshot.zeros(qkv_Mc, *shapes))
        qkv_btc, tail_bcw = causal_convolution(qkv_btc, weight_c1w, before.tail_bcw, lengths)
        q, k, v = qkv_btc.split(self._sections[:3], dim=-1)
        q_btnk, k_btnk = (x.unflatten(-1, (self.key_heads, self.key_head_dim)) for x in (q, k))
        v_bthv = v.unflatten(-1, (self.value_heads, self.value_head_dim))
        out_bthv, state_bhkv = self.gated_delta_rule(
            q_btnk, k_btnk, v_bthv, g_bth, beta_bth, before.state_bhkv
        )
        layer.commit(Snapshot(tail_bcw, state_bhkv), keep=advance.state.restarts_here)
        return _flat(out_bthv, layout, slots)

    def _norm(self, out_mhv: Tensor, z_mhv: Tensor) -> Tensor:
        """RMSNorm times SiLU of the gate. The weight's gradient is summed over tp here: each rank has its own heads."""
        weight = self.out_norm.weight
        if self.tp_size > 1:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        wide = torch.promote_types(out_mhv.dtype, torch.float32)
        normed = F.rms_norm(out_mhv.to(wide), (self.value_head_dim,), None, self.out_norm.eps).to(
            out_mhv.dtype
        )
        return (weight * normed * F.silu(z_mhv.to(wide))).to(out_mhv.dtype)

    def _own_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Kernel, A_log and dt_bias of the heads that this rank has after the exchange."""
        if self.cp_size == 1:
            return self.conv1d.weight, self.A_log, self.dt_bias
        rank, k, v = self.pg_collection.cp.rank(), self.key_head_dim, self.value_head_dim
        per_part = [self.key_heads * k, self.key_heads * k, self.value_heads * v]
        parts = self.conv1d.weight.split([n * self.cp_size for n in per_part])
        weight = torch.cat([part.narrow(0, rank * n, n) for part, n in zip(parts, per_part, strict=True)])
        heads = slice(rank * self.value_heads, (rank + 1) * self.value_heads)
        return weight, self.A_log[heads], self.dt_bias[heads]

    def _to_heads(self, qkv_mc: Tensor, ba_m: Tensor) -> tuple[Tensor, Tensor]:
        """q k v and b a of all heads and m slots -> those of this rank's heads and M slots."""
        cp = self.cp_size
        if cp == 1:
            return qkv_mc, ba_m
        parts = torch.cat([qkv_mc, ba_m], dim=-1).split([n * cp for n in self._sections], dim=-1)
        sent = torch.cat([part.unflatten(-1, (cp, -1)) for part in parts], dim=-1)  # [m, cp, x]
        received = all_to_all(self.pg_collection.cp, sent.transpose(0, 1).flatten(0, 1).contiguous())
        qkv_Mc, ba_M = received.split([sum(self._sections[:3]), 2 * self.value_heads], dim=-1)
        return qkv_Mc, ba_M

    def _to_tokens(self, x_Mx: Tensor) -> Tensor:
        """[M, this rank's heads] -> [m, all heads]."""
        cp = self.cp_size
        if cp == 1:
            return x_Mx
        received = all_to_all(self.pg_collection.cp, x_Mx.contiguous())
        return received.unflatten(0, (cp, -1)).transpose(0, 1).flatten(1)


def _batched(x_M: Tensor, layout: TokenLayout) -> Tensor:
    """[M, ...] -> [b, t, ...]: branches of unequal length are padded with zeros."""
    lengths = layout.lengths
    longest = max(lengths)
    if min(lengths) == longest:
        return x_M[: layout.tokens].unflatten(0, (len(lengths), longest))
    padded = torch.cat([x_M[: layout.tokens], x_M.new_zeros(1, *x_M.shape[1:])])
    return padded[_places(layout, longest, x_M.device)]


def _flat(x_bt: Tensor, layout: TokenLayout, slots: int) -> Tensor:
    """[b, t, ...] -> [M, ...]; padding slots are zero."""
    lengths = layout.lengths
    longest = max(lengths)
    flat = x_bt.flatten(0, 1)
    if min(lengths) != longest:
        flat = flat.index_select(0, _kept(lengths, flat.device))
    if flat.shape[0] == slots:
        return flat
    return torch.cat([flat, flat.new_zeros(slots - flat.shape[0], *flat.shape[1:])])


@lru_cache(maxsize=16)  # the same for every layer of a pass, forward and backward
def _places(layout: TokenLayout, longest: int, device: torch.device) -> Tensor:
    """[b, t] flat slot of each branch's tokens; the slot behind the last token stands for padding."""
    index = torch.full((len(layout.lengths), longest), layout.tokens)
    for b, (offset, length) in enumerate(zip(layout.offsets, layout.lengths, strict=False)):
        index[b, :length] = torch.arange(offset, offset + length)
    return index.to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _kept(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[N] which places of the padded batch, flat, hold tokens."""
    longest = max(lengths)
    index_N = torch.tensor([b * longest + i for b, n in enumerate(lengths) for i in range(n)])
    return index_N.to(device, non_blocking=True)


def gdn_spec(transformer_engine: bool) -> ModuleSpec:
    """The spec of a Gated DeltaNet mixer, for the place of a layer's self-attention."""
    in_proj: Any = ColumnParallelLinear
    out_proj: Any = RowParallelLinear
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import (
            TELayerNormColumnParallelLinear,
            TERowParallelLinear,
        )

        in_proj, out_proj = TELayerNormColumnParallelLinear, TERowParallelLinear
    return ModuleSpec(
        module=ResidentGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=in_proj, out_norm=GatedRMSNorm, out_proj=out_proj),
    )


__all__ = ["GatedRMSNorm", "ResidentGatedDeltaNet", "gdn_spec"]
