"""Self-attention with resident state, as Megatron-Core modules: each layer's q, k, v go to the state it belongs to."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_lrl.layers.advance import AdvanceContext
from megatron_lrl.layers.exchange import keys_to_owners
from megatron_lrl.layers.softmax.kv import KVLayer


class SegmentCoreAttention(MegatronModule):
    """Core attention over resident state.

    Takes Megatron's [s, b, h, d] with b = 1 (tokens of all branches lie in s) and returns [s, b, h d]. It has no
    parameters and keeps nothing: the `advance` in ``packed_seq_params`` knows the layout and the state.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_dropout or config.attention_dropout:
            raise ValueError("attention dropout is not part of a policy: set attention_dropout to 0")
        self.layer_number = max(1, layer_number)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [m, 1, H, d], key and value [m, 1, h, d] -> [m, 1, H d]."""
        if not isinstance(packed_seq_params, AdvanceContext):
            raise RuntimeError("the model runs only through megatron_lrl.layers.advance")
        k, v = _to_owners(packed_seq_params, key, value)
        o_mHd = self.attend(packed_seq_params, query.squeeze(1), k, v)
        return o_mHd.reshape(o_mHd.shape[0], 1, -1)

    def grow(self, advance: AdvanceContext, key: Tensor, value: Tensor) -> None:
        """The layer's state grows by key and value [m, 1, h, d] of new tokens whose attention nothing reads."""
        self.append(advance, *_to_owners(advance, key, value))

    def attend(self, advance: AdvanceContext, q_mHd: Tensor, k_mhd: Tensor, v_mhd: Tensor) -> Tensor:
        """Attention over the layer's state and the new tokens, by which it grows. Returns o_mHd.

        ``k_mhd``, ``v_mhd``: of the keys that are this rank's (`TokenLayout.pieces`).
        """
        layer = advance.state.layer(self.layer_number, KVLayer)
        return layer.attend(q_mHd, k_mhd, v_mhd, advance.layout, self.scale, advance.kv_cp_group)

    def append(self, advance: AdvanceContext, k_mhd: Tensor, v_mhd: Tensor) -> None:
        """The layer's state grows by new tokens whose attention nothing reads."""
        advance.state.layer(self.layer_number, KVLayer).append(k_mhd, v_mhd, advance.layout.pieces)


def _to_owners(advance: AdvanceContext, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return keys_to_owners(key.squeeze(1), value.squeeze(1), advance.layout, advance.kv_cp_group)


class RowParallelLinearWithBias(RowParallelLinear):
    """The attention output projection of models that bias it while their MLP has no biases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


class GatedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention with the output gate in the activation dtype, as transformers has it."""

    def __init__(self, *args: Any, rope_factor: float = 1.0, **kwargs: Any) -> None:
        """``rope_factor``: on cos and sin."""
        super().__init__(*args, **kwargs)
        # Megatron-Core's name for it; it would derive its own from YaRN settings.
        self._yarn_concentration_factor = rope_factor

    def grow_state(
        self, normed_smh: Tensor, angles: Tensor | tuple[Tensor, Tensor], advance: AdvanceContext
    ) -> None:
        """Grow the layer's state where nothing reads its output: keys and values alone are computed.

        ``normed_smh``: the layer's normed input [m (/ tp), 1, H]; ``angles``: RoPE's, of queries and keys if two.
        """
        # Query, key, value, and the output gate where there is one.
        _, key, value, *_ = self.get_query_key_value_tensors(
            normed_smh, None, output_gate=self.config.attention_output_gate
        )
        key = apply_rotary_pos_emb(
            key,
            angles[1] if isinstance(angles, tuple) else angles,
            config=self.config,
            mscale=self._yarn_concentration_factor,
            cp_group=self.pg_collection.cp,
        )
        self.core_attention.grow(advance, key, value)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [m, 1, H d] times the sigmoid of gate [m, 1, H, d]."""
        return x * torch.sigmoid(gate.reshape(x.shape))
