"""Multi-head latent attention over resident rows, absorbed: queries go to the latent, latents never become heads.

    x ─ q_down ─ norm ─ q_up ─┬─ nope [m, N, dn] ── W_UK ──► [m, N, r] ─┐
                              └─ rope [m, N, dr] ── rotated ────────────┴─► q [m, N, c] ─┐
    x ─ kv_down ─┬─ latent ── norm ──┐                                                   ├─ attention, one KV head
                 └─ rope key ────────┴─ exchange over tp ─ rotated ─► row [m, 1, c] ─────┘        │
                                                        resident      key and value      o [m, N, r] ─ W_UV ─ out

    score = (W_UK' q_nope) · latent + q_rope · k_rope        DeepSeek-V2, arXiv:2405.04434, section 2.1

Every tp rank has its heads and all rows. The down-projections are whole on each rank and run on its slice of the tokens
(sequence parallelism) or on all; what crosses is the latent, and its backward adds up the heads of all ranks, the
rotated key's gradient included.

Legend: m slots of this rank (s: its tp slice of them), N heads of this tp rank, r latent, dr rotated dims, c = r + dr,
dn key dims without rotation, dv value dims, H hidden size, R rank of an adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_lrl.layers.advance import AdvanceContext
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.mla.sizes import NORM_EPS, sizes_of, softmax_scale
from megatron_lrl.layers.mla.state import LatentLayer


class WholeLinear(torch.nn.Linear):
    """A projection that every tp rank has whole; under sequence parallelism its gradient is the ranks' sum."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__(
            inputs, outputs, bias=False, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ResidentMLA(MegatronModule):
    """The token mixer of a layer. Runs through `megatron_lrl.layers.advance`."""

    def __init__(
        self,
        config: Any,
        *,
        arch: Architecture,
        norm: Any,
        layer_number: int = 1,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        spec = sizes_of(arch)
        self.spec, self.layer_number, self.tp = spec, max(1, layer_number), pg_collection.tp
        self.heads = arch.num_heads // self.tp.size()
        self.scale, self.rope_factor = softmax_scale(spec, arch.rope), arch.rope.attention_factor
        parallel = {
            "config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False,
            "is_expert": False, "tp_group": self.tp,
        }  # fmt: skip
        queries = arch.num_heads * spec.query
        if spec.query_rank:
            self.linear_q_down = WholeLinear(config, arch.hidden_size, spec.query_rank)
            self.q_norm = norm(config=config, hidden_size=spec.query_rank, eps=NORM_EPS)
        self.linear_q_up = ColumnParallelLinear(
            spec.query_rank or arch.hidden_size, queries, gather_output=False, **parallel
        )
        self.linear_kv_down = WholeLinear(config, arch.hidden_size, spec.row)
        self.kv_norm = norm(config=config, hidden_size=spec.latent, eps=NORM_EPS)
        # Its weight is taken apart; it never runs as a layer.
        self.linear_kv_up = ColumnParallelLinear(
            spec.latent, arch.num_heads * spec.expanded, gather_output=False, **parallel
        )
        self.linear_proj = RowParallelLinear(
            arch.num_heads * spec.value, arch.hidden_size, input_is_parallel=True, **parallel
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Any = None,
        packed_seq_params: AdvanceContext | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [s, 1, H] -> the same shape, and no bias. Grows the advance's state of this layer."""
        if not isinstance(packed_seq_params, AdvanceContext):
            raise RuntimeError("the model runs only through megatron_lrl.layers.advance")
        advance = packed_seq_params
        row_m1c = self._rows(hidden_states, rotary_pos_emb)
        q_mNc = self._queries(hidden_states, rotary_pos_emb)
        layer = advance.state.layer(self.layer_number, LatentLayer)
        o_mNc = layer.attend(q_mNc, row_m1c, row_m1c, advance.layout, self.scale, advance.kv_cp_group)
        out_Nmv = self._from_latent(o_mNc[..., : self.spec.latent].transpose(0, 1))
        return self.linear_proj(out_Nmv.transpose(0, 1).flatten(1).unsqueeze(1))

    def grow_state(self, normed_smh: Tensor, angles: Any, advance: AdvanceContext) -> None:
        """Grow the layer's state where nothing reads its output: rows alone are computed."""
        row_m1c = self._rows(normed_smh, angles)
        advance.state.layer(self.layer_number, LatentLayer).append(row_m1c, row_m1c, advance.layout.pieces)

    def _rows(self, x_s1H: Tensor, angles: Any) -> Tensor:
        """[m, 1, c]: normed latent and rotated key of all of this rank's slots, on every tp rank."""
        widths = [self.spec.latent, self.spec.rotary]
        latent, key = self.linear_kv_down(x_s1H).split(widths, dim=-1)
        latent = self.kv_norm(latent)
        if self.tp.size() > 1:  # both in one message
            latent, key = self._everywhere(torch.cat([latent, key], dim=-1)).split(widths, dim=-1)
        return torch.cat([latent, self._rotated(key.unsqueeze(2), angles, 1).squeeze(2)], dim=-1)

    def _queries(self, x_s1H: Tensor, angles: Any) -> Tensor:
        """[m, N, c]: queries that meet rows."""
        if self.spec.query_rank:
            x_s1H = self.q_norm(self.linear_q_down(x_s1H))
        q_m1Nd = self.linear_q_up(x_s1H)[0].unflatten(-1, (self.heads, self.spec.query))
        nope_m1Nd, rope_m1Nd = q_m1Nd.split([self.spec.nope, self.spec.rotary], dim=-1)
        latent_Nmr = self._to_latent(nope_m1Nd.squeeze(1).transpose(0, 1))
        return torch.cat([latent_Nmr.transpose(0, 1), self._rotated(rope_m1Nd, angles, 0).squeeze(1)], dim=-1)

    def _to_latent(self, nope_Nmd: Tensor) -> Tensor:
        """[N, m, dn] -> [N, m, r]: the queries' part without rotation, times W_UK of its head."""
        latent_Nmr = nope_Nmd @ self._heads(self.linear_kv_up.weight)[:, : self.spec.nope]
        if (adapter := self._adapter) is None:
            return latent_Nmr
        a_Rr, b_NdR = adapter.whole_a(), self._heads(adapter.lora_B)[:, : self.spec.nope]
        return latent_Nmr + ((nope_Nmd.to(b_NdR.dtype) @ b_NdR) @ a_Rr * adapter.scale).to(latent_Nmr.dtype)

    def _from_latent(self, o_Nmr: Tensor) -> Tensor:
        """[N, m, r] -> [N, m, dv]: what attention took of the latents, times W_UV of its head."""
        out_Nmv = o_Nmr @ self._heads(self.linear_kv_up.weight)[:, self.spec.nope :].transpose(1, 2)
        if (adapter := self._adapter) is None:
            return out_Nmv
        a_Rr, b_NvR = adapter.whole_a(), self._heads(adapter.lora_B)[:, self.spec.nope :]
        low_NmR = o_Nmr.to(a_Rr.dtype) @ a_Rr.t()
        return out_Nmv + (low_NmR @ b_NvR.transpose(1, 2) * adapter.scale).to(out_Nmv.dtype)

    @property
    def _adapter(self) -> Any:
        """That of the up-projection, which is taken apart here: its layer's own hook never runs."""
        adapter = getattr(self.linear_kv_up, "adapter", None)
        return adapter if adapter is not None and adapter.enabled else None

    def _heads(self, weight: Tensor) -> Tensor:
        """[N (dn + dv), x] -> [N, dn + dv, x]."""
        return weight.view(self.heads, self.spec.expanded, -1)

    def _everywhere(self, x_s1c: Tensor) -> Tensor:
        """All slots on every tp rank; the backward adds up what the ranks' heads found."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(
                x_s1c, tensor_parallel_output_grad=True, group=self.tp
            )
        return copy_to_tensor_model_parallel_region(x_s1c, group=self.tp)

    def _rotated(self, x: Tensor, angles: Any, number: int) -> Tensor:
        """x [m, 1, h, dr]; ``number`` of the angles where queries and keys have their own."""
        return apply_rotary_pos_emb(
            x,
            angles[number] if isinstance(angles, tuple) else angles,
            config=self.config,
            mscale=self.rope_factor,
        )


__all__ = ["ResidentMLA"]
