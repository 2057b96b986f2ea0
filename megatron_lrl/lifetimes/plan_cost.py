"""Work of one window in floating-point operations, counted from shapes: where shared prefixes break even.

Counted are matrix products: 2 per weight and token forward, twice that backward; attention 4 h d per (query, key) pair
and layer forward, 2.5 times that backward, 1.5 times where the keys are constant (three of five products); the head
computes its logits again in the backward. Pipeline bubbles, communication, norms and the optimizer are left out.

Symbols as everywhere: P prompt tokens (the prefix is P - 1), R response tokens, G responses of a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lrl.models.hf_config import Architecture


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
        return Cost(0.0, 3 * tokens.linear(prefix + response) + 3.5 * tokens.causal(prefix + response)
                    + tokens.head(response))  # fmt: skip
    swept = live[contract]
    constant = prefix - swept
    each = 3 * tokens.linear(response) + 3.5 * tokens.causal(response) + tokens.head(response)
    each += tokens.pairs(response * constant) * 2.5 + tokens.pairs(response * swept) * 3.5
    capture = tokens.linear(prefix, state_only=True) + tokens.causal(prefix, state_only=True)
    sweep = 3 * tokens.linear(swept, state_only=True) + 3.5 * tokens.causal(swept, state_only=True)
    sweep += 2.5 * tokens.pairs(swept * constant, state_only=True)
    return Cost(capture + sweep, each)


def break_even_group(ours: Cost, conventional: Cost) -> int | None:
    """Smallest group for which a contract does less work than `conventional`; None if no group is large enough."""
    gain = conventional.each - ours.each
    return None if gain <= 0 else max(1, math.floor(ours.shared / gain) + 1)


class _Tokens:
    """Forward operations of the whole model. ``state_only``: without what follows the last layer's keys and values."""

    def __init__(self, arch: Architecture) -> None:
        queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self._layers = arch.num_layers
        self._qkv = 2.0 * arch.hidden_size * (queries + 2 * keys)
        self._layer = self._qkv + 2.0 * arch.hidden_size * (queries + 3 * arch.ffn_hidden_size)
        self._pair = 4.0 * queries
        self._head = 2.0 * arch.hidden_size * arch.vocab_size

    def linear(self, count: int, state_only: bool = False) -> float:
        layers = self._layers - 1 if state_only else self._layers
        return count * (layers * self._layer + (self._qkv if state_only else 0.0))

    def pairs(self, count: int, state_only: bool = False) -> float:
        return count * self._pair * (self._layers - 1 if state_only else self._layers)

    def causal(self, count: int, state_only: bool = False) -> float:
        return self.pairs(1, state_only) * count * (count + 1) / 2

    def head(self, count: int) -> float:
        """Forward, the same again in the backward, and the backward's two products."""
        return 4 * self._head * count
