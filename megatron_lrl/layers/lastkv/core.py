"""Core attention of a LastKV model: its state reads across layers, and each layer has a gate."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_lrl.layers.advance import AdvanceContext
from megatron_lrl.layers.lastkv.state import LastKVState
from megatron_lrl.layers.lastkv.together import LastKVTogether
from megatron_lrl.layers.softmax.core import SegmentCoreAttention


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

    def attend(self, advance: AdvanceContext, q_mHd: Tensor, k_mhd: Tensor, v_mhd: Tensor) -> Tensor:
        return _state(advance).attend(
            self.layer_number,
            q_mHd,
            k_mhd,
            v_mhd,
            advance.layout,
            self.scale,
            advance.kv_cp_group,
            self.lastkv_gate,
        )

    def append(self, advance: AdvanceContext, k_mhd: Tensor, v_mhd: Tensor) -> None:
        _state(advance).append(self.layer_number, k_mhd, v_mhd, advance.layout)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        """The gate, sharded over tp along its heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"lastkv_gate": 0}, sharded_offsets
        )


def _state(advance: AdvanceContext) -> LastKVState | LastKVTogether:
    if not isinstance(advance.state, LastKVState | LastKVTogether):
        raise TypeError("a LastKV model needs a LastKV state")
    return advance.state
