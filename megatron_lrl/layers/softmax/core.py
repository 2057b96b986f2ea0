"""The Megatron-Core ``core_attention`` module: hands each layer's q, k, v to the state it belongs to."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class LayerAttention(Protocol):
    """What carries an `advance` down to core attention, in the place of Megatron-Core's PackedSeqParams."""

    def attend(
        self,
        layer_number: int,
        q_mHd: Tensor,
        k_mhd: Tensor,
        v_mhd: Tensor,
        scale: float,
        gate_h: Tensor | None = None,
    ) -> Tensor:
        """Attend over the layer's state and the new tokens, and grow the state. Returns o_mHd."""


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
        self.lastkv_gate: torch.nn.Parameter | None = None
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
        if packed_seq_params is None or not hasattr(packed_seq_params, "attend"):
            raise RuntimeError("the model runs only through megatron_lrl.layers.advance")
        advance: LayerAttention = packed_seq_params  # type: ignore[assignment]
        o_mHd = advance.attend(
            self.layer_number,
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            self.scale,
            self.lastkv_gate,
        )
        return o_mHd.reshape(o_mHd.shape[0], 1, -1)


class LastKVCoreAttention(SegmentCoreAttention):
    """`SegmentCoreAttention` with the LastKV gate: one logit of alpha per KV head, sharded with the heads."""

    def __init__(self, config: Any, layer_number: int, **kwargs: Any) -> None:
        super().__init__(config, layer_number, **kwargs)
        heads = config.num_query_groups // config.tensor_model_parallel_size
        gate_h = torch.nn.Parameter(
            torch.empty(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        set_tensor_model_parallel_attributes(gate_h, is_parallel=True, dim=0, stride=1)
        self.lastkv_gate = gate_h

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        """The gate, sharded over tp along its heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"lastkv_gate": 0}, sharded_offsets
        )
