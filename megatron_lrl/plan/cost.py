"""Work of one window in floating-point operations, counted from shapes: where shared prefixes break even.

Counted are matrix products: 2 per weight and token forward, twice that backward; attention 4 h d per (query, key) pair
and layer forward, 2.5 times that backward, 1.5 times where the keys are constant (three of five products); the head
computes its logits again in the backward. Layer kinds count their own (`LayerKind.operations`). Of experts, the top k
and the shared one count. Pipeline bubbles, communication, norms, the optimizer and snapshots that a sweep makes again
are left out.

Symbols as everywhere: P prompt tokens (the prefix is P - 1), R response tokens, G responses of a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.kind import Operations
from megatron_lrl.layers.kinds import KINDS
from megatron_lrl.layers.moe import kind as moe


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
    """Operations of the whole model. ``state_only``: without what follows the last layer's state."""

    def __init__(self, arch: Architecture) -> None:
        layers = [
            (KINDS[mixer].operations(arch), moe.operations(arch) if sparse else _dense(arch))
            for mixer, sparse in zip(arch.mixers, arch.moe_layers, strict=True)
        ]
        self._head = 2.0 * arch.hidden_size * arch.vocab_size
        self._linear = sum(mixer.weights + mlp.weights for mixer, mlp in layers)
        self._rule = sum(mixer.scan for mixer, _ in layers)
        self._pair = sum(mixer.pair for mixer, _ in layers)
        # What the last layer leaves out where only its state is wanted.
        last, last_mlp = layers[-1]
        self._rest, self._last_pair = last.rest + last_mlp.rest, last.pair

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
        """Attention of so many (query, key) pairs in every layer that has such, forward."""
        return count * (self._pair - (self._last_pair if state_only else 0.0))

    def head(self, count: int) -> float:
        """Forward, the same again in the backward, and the backward's two products."""
        return 4 * self._head * count

    def _weights(self, count: int, state_only: bool) -> float:
        return count * (self._linear - (self._rest if state_only else 0.0))

    def _causal(self, count: int, state_only: bool) -> float:
        return self.pairs(1, state_only) * count * (count + 1) / 2


def _dense(arch: Architecture) -> Operations:
    """A dense MLP: gate, up and down."""
    weights = 6.0 * arch.hidden_size * arch.ffn_hidden_size
    return Operations(weights, rest=weights)
