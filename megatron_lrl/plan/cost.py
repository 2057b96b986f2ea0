"""Work of one window in floating-point operations, counted from shapes: where shared prefixes break even.

Counted are matrix products: 2 per weight and token forward, twice that backward; attention 4 h d per (query, key) pair
and layer forward, 2.5 times that backward, 1.5 times where the keys are constant (three of five products); the head
computes its logits again in the backward. The delta rule of Gated DeltaNet layers is counted by its blocks of 64
tokens; its backward runs it twice more before the two products of each. Of experts, the top k and the shared one
count. Pipeline bubbles, communication, norms, the optimizer and snapshots that a sweep makes again are left out.

Symbols as everywhere: P prompt tokens (the prefix is P - 1), R response tokens, G responses of a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lrl.models.hf_config import ATTENTION, Architecture

_BLOCK = 64  # tokens of a block of the delta rule


@dataclass(frozen=True)
class Cost:
    """Operations of one prompt's window as ``shared + G * each``."""

    shared: float  # capture and sweep
    each: float  # one response

    def total(self, group: int) -> float:
        return self.shared + group * self.each


def window_cost(arch: Architecture, contract: str, prompt: int, response: int, truncate: int = 0) -> Cost:
    """Operations of a prompt's window under a contract; ``truncate`` live tokens under "truncated"."""
    prefix = prompt - 1
    tokens, live = _Tokens(arch), {"response_only": 0, "exact": prefix, "truncated": min(truncate, prefix)}
    if contract == "conventional":
        return Cost(0.0, tokens.trained(prefix + response) + tokens.head(response))
    swept = live[contract]
    constant = prefix - swept
    each = tokens.trained(response) + tokens.head(response)
    each += tokens.pairs(response * constant) * 2.5 + tokens.pairs(response * swept) * 3.5
    capture = tokens.forward(prefix, state_only=True)
    sweep = tokens.trained(swept, state_only=True)
    sweep += 2.5 * tokens.pairs(swept * constant, state_only=True)
    return Cost(capture + sweep, each)


def break_even_group(ours: Cost, conventional: Cost) -> int | None:
    """Smallest group for which a contract does less work than `conventional`; None if no group is large enough."""
    gain = conventional.each - ours.each
    return None if gain <= 0 else max(1, math.floor(ours.shared / gain) + 1)


class _Tokens:
    """Operations of the whole model. ``state_only``: without what follows the last layer's keys and values, or its
    recurrent state."""

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        queries = arch.num_heads * arch.head_dim
        self._pair = 4.0 * queries
        self._head = 2.0 * arch.hidden_size * arch.vocab_size
        self._attention = arch.mixers.count(ATTENTION)
        layers = list(zip(arch.mixers, arch.moe_layers, strict=True))
        self._linear = sum(self._mixer(mixer) + self._mlp(sparse) for mixer, sparse in layers)
        self._rule = self._delta_rule() * (arch.num_layers - self._attention)
        # What the last layer leaves out where only its state is wanted.
        self._ends_in_attention = arch.mixers[-1] == ATTENTION
        self._rest = self._mlp(arch.moe_layers[-1])
        if self._ends_in_attention:
            self._rest += 2.0 * arch.hidden_size * queries  # the output projection

    def forward(self, count: int, state_only: bool = False) -> float:
        return self._weights(count, state_only) + count * self._rule + self._causal(count, state_only)

    def trained(self, count: int, state_only: bool = False) -> float:
        """Forward and backward."""
        return (
            3 * self._weights(count, state_only)
            + 5 * count * self._rule
            + 3.5 * self._causal(count, state_only)
        )

    def pairs(self, count: int, state_only: bool = False) -> float:
        """Attention of so many (query, key) pairs in every attention layer, forward."""
        return count * self._pair * (self._attention - (state_only and self._ends_in_attention))

    def head(self, count: int) -> float:
        """Forward, the same again in the backward, and the backward's two products."""
        return 4 * self._head * count

    def _weights(self, count: int, state_only: bool) -> float:
        return count * (self._linear - (self._rest if state_only else 0.0))

    def _causal(self, count: int, state_only: bool) -> float:
        return self.pairs(1, state_only) * count * (count + 1) / 2

    def _mixer(self, mixer: str) -> float:
        """Projections of a token; of Gated DeltaNet also the convolution."""
        arch, gdn = self._arch, self._arch.gdn
        if mixer == ATTENTION:
            queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
            return 2.0 * arch.hidden_size * ((3 if arch.output_gate else 2) * queries + 2 * keys)
        assert gdn is not None
        values = gdn.value_heads * gdn.value_dim
        projected = gdn.conv_channels + 2 * values + 2 * gdn.value_heads  # q k v, z, b a; and out
        return 2.0 * arch.hidden_size * projected + 2.0 * gdn.conv_channels * gdn.conv_kernel

    def _mlp(self, sparse: bool) -> float:
        arch, moe = self._arch, self._arch.moe
        if not sparse:
            return 6.0 * arch.hidden_size * arch.ffn_hidden_size
        assert moe is not None
        width = moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
        return 2.0 * arch.hidden_size * (3 * width + moe.num_experts + moe.shared_gate)

    def _delta_rule(self) -> float:
        """Of a token in one layer: k k', q k', the triangular solve, attention within the block, and three products
        with the state."""
        if (gdn := self._arch.gdn) is None:
            return 0.0
        k, v, c = gdn.key_dim, gdn.value_dim, _BLOCK
        return float(gdn.value_heads * (4 * c * k + c * (k + v) + 2 * c * v + 6 * k * v))
