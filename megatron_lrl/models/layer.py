"""The transformer layer, with a short form for passes that only grow the state.

Capture and sweep have no head: of the last layer nothing is read later but its keys and values, so its
attention, output projection and MLP, and the final norm, are not computed.

Legend: m slots of this rank (/ tp under sequence parallelism for hidden states), h KV heads, d head dim.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class PolicyLayer(TransformerLayer):
    """Megatron-Core's layer; the model's last one stops at its keys and values if nothing reads further."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As Megatron-Core's. The short form returns no rows: [0, 1, hidden], which the final norm passes on."""
        advance = kwargs.get("packed_seq_params")
        if getattr(advance, "state_only", False) and self.layer_number == self.config.num_layers:
            return self._append(kwargs["hidden_states"], kwargs["rotary_pos_emb"], advance), kwargs.get("context")
        return super().forward(*args, **kwargs)

    def _append(self, hidden_smh: Tensor, angles: Any, advance: Any) -> Tensor:
        """Compute the layer's keys and values and hand them to the state."""
        attention = self.self_attention
        _, key, value = attention.get_query_key_value_tensors(self.input_layernorm(hidden_smh), None)
        key = apply_rotary_pos_emb(
            key,
            angles[1] if isinstance(angles, tuple) else angles,
            config=self.config,
            mscale=attention._yarn_concentration_factor,
            cp_group=attention.pg_collection.cp,
        )
        advance.append(self.layer_number, key.squeeze(1), value.squeeze(1))
        return hidden_smh.new_empty(0, *hidden_smh.shape[1:])
