"""The transformer layer, with a short form for passes that only grow the state.

Capture and sweep have no head: of the last layer nothing is read later but its keys and values, so its
attention, output projection and MLP, and the final norm, are not computed.

Legend: m slots of this rank (/ tp under sequence parallelism for hidden states), h KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class Narrow(IdentityOp):
    """Hands a float32 residual stream on in the parameters' dtype, where a fused module norms its own input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.to(self.dtype)


class PolicyLayer(TransformerLayer):
    """Megatron-Core's layer; the model's last one stops at its keys and values if nothing reads further.

    With ``config.fp32_residual_connection`` the layer's input and output are float32 and its norms hand on the
    parameters' dtype; Megatron-Core adds up in float32 and sends float32 between pipeline stages.
    With ``sandwich_norm`` the outputs of attention and MLP are normed before they join the residual.
    """

    def __init__(
        self, config: Any, submodules: Any, *args: Any, sandwich_norm: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        if config.fp32_residual_connection:
            for name in ("input_layernorm", "pre_mlp_layernorm"):
                if isinstance(getattr(self, name), IdentityOp):  # Transformer Engine's fused modules norm
                    setattr(self, name, Narrow(config.params_dtype))
        if sandwich_norm is not None:
            size = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
            self.post_self_attn_layernorm = sandwich_norm(config=config, **size)
            self.post_mlp_layernorm = sandwich_norm(config=config, **size)
            # What joins the residual, both times.
            self.self_attn_bda: Any = _normed(submodules.self_attn_bda, self.post_self_attn_layernorm)
            self.mlp_bda: Any = _normed(submodules.mlp_bda, self.post_mlp_layernorm)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As Megatron-Core's. The short form returns no rows, [0, 1, hidden], which the final norm passes on: a slice
        of its input, so that a zero gradient finds its way to every layer before it."""
        advance = kwargs.get("packed_seq_params")
        if getattr(advance, "state_only", False) and self.layer_number == self.config.num_layers:
            hidden_smh = kwargs["hidden_states"]
            self.self_attention.grow_state(
                self.input_layernorm(hidden_smh), kwargs["rotary_pos_emb"], advance
            )
            return hidden_smh[:0], kwargs.get("context")
        return super().forward(*args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As Megatron-Core's; the pass's routing hook, if it has one, sees this layer's router."""
        hook = getattr(kwargs.get("packed_seq_params"), "routing", None)
        if hook is None or not self.is_moe_layer:
            return super()._forward_mlp(hidden_states, *args, **kwargs)
        router = self.mlp.router
        router.hook = hook
        try:
            return super()._forward_mlp(hidden_states, *args, **kwargs)
        finally:
            router.hook = None


def _normed(add: Callable[..., Any], norm: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Megatron-Core's bias-dropout-add with a norm on what is added."""

    def build(*settings: Any) -> Callable[..., Tensor]:
        join = add(*settings)

        def joined(
            output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
        ) -> Tensor:
            output, bias = output_with_bias
            return join((norm(output if bias is None else output + bias), None), residual, dropout)

        return joined

    return build
