"""`advance`: feed tokens at the state's position and grow the state.

Capture, sampling, scoring and replay all call it; it has no mode. Whether a graph is kept is the caller's ``with``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_lrl.attention.layout import TokenLayout
from megatron_lrl.state.sequence import SequenceState

Head = Callable[..., Tensor]
"""Called on the last stage as ``head(hidden_smh, layout, model)``: turns final hidden states into the output."""


class AdvanceContext(PackedSeqParams):
    """Rides through Megatron-Core's layers in the place of packed-sequence parameters."""

    def __init__(self, state: SequenceState, layout: TokenLayout, cp_group: Any, device: torch.device) -> None:
        super().__init__(qkv_format="sbhd")
        self.state, self.layout, self.kv_cp_group = state, layout, cp_group
        self.positions_m = layout.positions(device)

    def attend(self, layer_number: int, q_mHd: Tensor, k_mhd: Tensor, v_mhd: Tensor, scale: float) -> Tensor:
        """Called by `SegmentCoreAttention`: the layer's state attends and grows."""
        layer = self.state.layer(layer_number)
        return layer.attend(q_mHd, k_mhd, v_mhd, self.layout, scale, self.kv_cp_group)


def token_layout(model: Any, state: SequenceState, lengths: Sequence[int]) -> TokenLayout:
    """How ``lengths`` new tokens per branch lie on this rank, from the state's positions on."""
    config, cp = model.config, model.pg_collection.cp
    return TokenLayout(
        starts=tuple(state.counts),
        lengths=tuple(lengths),
        cp_size=cp.size(),
        cp_rank=cp.rank(),
        multiple=config.tensor_model_parallel_size if config.sequence_parallel else 1,
    )


def advance(
    model: Any, state: SequenceState, tokens: Sequence[Sequence[int] | Tensor], head: Head | None = None
) -> Tensor:
    """Feed ``tokens[i]`` to branch i and grow the state by them.

    Args:
        model: this stage's `PolicyModel`, or Megatron-Core's DDP around it.
        state: open state with as many branches as ``tokens``; fails if frozen or closed.
        tokens: token ids of each branch, any lengths (0 included), at least one token in all.
        head: what to compute from the final hidden states (last stage only). None: nothing is computed after the
            last layer.

    Returns: the head's output on the last stage, hidden states [m / tp, 1, hidden] for the next stage elsewhere.

    Under context parallelism every rank passes the same tokens and computes its slice.
    """
    state.check_open()
    core = model.module if hasattr(model, "module") else model
    lengths = [len(branch) for branch in tokens]
    if len(lengths) != state.branches or not sum(lengths):
        raise ValueError(f"expected tokens for {state.branches} branches, got lengths {lengths}")
    layout = token_layout(core, state, lengths)
    device = core.rotary_pos_emb.inv_freq.device
    flat = torch.cat([torch.as_tensor(branch, dtype=torch.long) for branch in tokens]).to(device)
    context = AdvanceContext(state, layout, core.pg_collection.cp, device)

    def process(*, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states if head is None else head(hidden_states, layout, core)

    try:
        output = model(
            input_ids=layout.slice_local(flat).unsqueeze(0),
            position_ids=None,
            attention_mask=None,
            packed_seq_params=context,
            output_processor=process,
        )
    except BaseException:
        # Some layers have grown and others have not: this state must not be read again.
        state.close()
        raise
    state.grow(layout.lengths)
    return output
