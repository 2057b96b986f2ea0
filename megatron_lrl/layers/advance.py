"""`advance`: feed tokens at the state's position and grow the state.

Capture, sampling, scoring and replay all call it; it has no mode. Whether a graph is kept is the caller's ``with``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_lrl.layers.layout import TokenLayout
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.layers.together import Together
from megatron_lrl.runtime import unwrap

Head = Callable[..., Tensor]
"""Called on the last stage as ``head(hidden_smh, layout, model)``: turns final hidden states into the output.
An advance that is cut into rounds calls it once per round and joins the results along their last axis."""

Tokens = Sequence[int] | Tensor

State = SequenceState | Together


class AdvanceContext(PackedSeqParams):
    """Rides through Megatron-Core's layers in the place of packed-sequence parameters."""

    def __init__(
        self,
        state: State,
        layout: TokenLayout,
        cp_group: Any,
        device: torch.device,
        state_only: bool = False,
        routing: Any = None,
    ) -> None:
        """``state_only``: nothing reads the final hidden states, so the last layer may stop at its keys and values.
        ``routing``: what this pass's routers show their decisions to."""
        super().__init__(qkv_format="sbhd")
        self.state, self.layout, self.kv_cp_group, self.state_only = state, layout, cp_group, state_only
        self.routing = routing
        self.positions_m = layout.positions(device)


def token_layout(model: Any, state: State, lengths: Sequence[int]) -> TokenLayout:
    """How ``lengths`` new tokens per branch lie on this rank, from the state's positions on."""
    config, cp = model.config, model.pg_collection.cp
    return TokenLayout(
        starts=tuple(state.counts),
        lengths=tuple(lengths),
        cp_size=cp.size(),
        cp_rank=cp.rank(),
        multiple=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        same_bits=model.same_bits,
    )


def local_keys(model: Any, state: State, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Keys of each stretch [low, high) of positions that lie on this rank, if it is fed to a state of one branch."""
    return [replace(token_layout(model, state, [high - low]), starts=(low,)).keys for low, high in spans]


def split_rounds(state: State, tokens: Sequence[Tokens], longest: int = 0) -> list[list[Tokens]]:
    """The tokens of each pass over the model that an advance by ``tokens`` takes.

    ``longest``: a pass feeds no more of a branch than this (0: as many as the state allows).
    """
    rounds = state.rounds([len(branch) for branch in tokens])
    if longest:
        rounds = [part for lengths in rounds for part in _cut(lengths, longest)]
    ends = [list(accumulate(lengths)) for lengths in zip(*rounds, strict=True)]
    return [
        [
            branch[end[i] - lengths[j] : end[i]]
            for j, (branch, end) in enumerate(zip(tokens, ends, strict=True))
        ]
        for i, lengths in enumerate(rounds)
    ]


def _cut(lengths: Sequence[int], longest: int) -> list[tuple[int, ...]]:
    """Tokens per branch of each part of a round."""
    return [
        tuple(min(longest, max(0, length - done)) for length in lengths)
        for done in range(0, max(lengths), longest)
    ]


def advance(
    model: Any, state: State, tokens: Sequence[Tokens], head: Head | None = None, routing: Any = None
) -> Tensor:
    """Feed ``tokens[i]`` to branch i and grow the state by them.

    Args:
        model: this stage's `PolicyModel`, or Megatron-Core's DDP around it.
        state: open state with as many branches as ``tokens``; fails if frozen or closed.
        tokens: token ids of each branch, any lengths (0 included), at least one token in all.
        head: what to compute from the final hidden states (last stage only). None: of the last layer only the keys
            and values are computed, which is all that later tokens read.
        routing: sees, and may replace, how tokens are routed to experts; ``routing.begin(layout, model)`` gives a
            pass its hook.

    Returns: the head's output on the last stage (without a head no rows: [0, 1, hidden]), hidden states
    [m / tp, 1, hidden] for the next stage elsewhere.

    Under context parallelism every rank passes the same tokens and computes its slice. With pipeline parallelism the
    caller feeds one round at a time (`split_rounds`) and settles the state between them.
    """
    state.check_open()
    core = unwrap(model)
    lengths = [len(branch) for branch in tokens]
    if len(lengths) != state.branches or not sum(lengths):
        raise ValueError(f"expected tokens for {state.branches} branches, got lengths {lengths}")
    rounds = split_rounds(state, tokens)
    if len(rounds) > 1 and core.pg_collection.pp.size() > 1:
        raise ValueError("under pipeline parallelism an advance takes one round: use split_rounds and settle")
    outputs = []
    try:
        for part in rounds:
            outputs.append(_pass(model, core, state, part, head, routing))
    except BaseException:
        # Some layers have grown and others have not: this state must not be read again.
        state.close()
        raise
    if len(outputs) == 1 or head is None:
        return outputs[-1]
    return torch.cat(outputs, dim=-1)


def _pass(
    model: Any, core: Any, state: State, tokens: Sequence[Tokens], head: Head | None, routing: Any
) -> Tensor:
    """One pass over the model."""
    layout = token_layout(core, state, [len(branch) for branch in tokens])
    device = core.rotary_pos_emb.inv_freq.device
    flat = torch.cat([torch.as_tensor(branch, dtype=torch.long) for branch in tokens])
    hook = None if routing is None else routing.begin(layout, core)
    context = AdvanceContext(
        state, layout, core.pg_collection.cp, device, state_only=head is None, routing=hook
    )

    def process(*, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states if head is None else head(hidden_states, layout, core)

    output = model(
        input_ids=layout.slice_local(flat).to(device, non_blocking=True).unsqueeze(0),
        position_ids=None,
        attention_mask=None,
        packed_seq_params=context,
        output_processor=process,
    )
    state.grow(layout.lengths)
    return output
