"""Where sampler and replay part: the first layer and operation that gives a response's token other bits.

    sample ─ hash of every operation's output, by token ─┐
                                                         ├─ the earliest token, its first operation that differs
    replay ─ the same ───────────────────────────────────┘

Legend: m slots of this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_lrl.layers.advance import split_rounds
from megatron_lrl.layers.layout import TokenLayout
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.models.head import LogprobHead, Targets, logits_rows
from megatron_lrl.passes.sweep import TokenRun, feed
from megatron_lrl.rollout.builtin import Sampler

TOKENS = 4
"""Tokens of each response that are looked at."""
_UNCOMPARED = (".experts.", "rotary_pos_emb")
"""Modules whose rows are not tokens in their order."""


class Row(NamedTuple):
    """One operation's output for one token; ordered as a token passes them."""

    replica: int
    position: int
    layer: int  # 1-based; 0: before the layers
    order: int
    operation: str
    response: int
    part: int  # tp rank, where each has columns of its own


@dataclass
class _Scored:
    """What lets a pass compute log-probabilities, so that no layer stops early."""

    targets: Targets
    temperature: float
    chunk: int
    routing: Any = None

    def head(self) -> LogprobHead:
        return LogprobHead(self.targets, self.temperature, self.chunk)

    def finish(self, values_2S: torch.Tensor, index_S: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise RuntimeError("a pass without a graph has no loss")


def parting(run: Run, prefix: PromptGroup) -> str | None:
    """Sample a few tokens from a captured prefix and replay them; names the first difference, or None.

    Collective. Every rank returns the same.
    """
    rollout, model = run.config.rollout, run.core(prefix.model)
    tokens = min(TOKENS, rollout.max_new_tokens)
    with torch.no_grad(), _hashing(model, run.runtime.dp_rank) as sampled:
        responses = Sampler(run, ()).sample(prefix, rollout.group_size, tokens, 0).responses
    with torch.no_grad(), _hashing(model, run.runtime.dp_rank) as replayed:
        state = prefix.fork(len(responses))
        fed = [[prefix.prompt_ids[-1], *response.ids[:-1]] for response in responses]
        chunk = logits_rows(run.config, run.arch.vocab_size, run.runtime.layout.tp)
        first = [len(prefix.prompt_ids)] * len(responses)
        terms = _Scored(Targets(first, [r.ids for r in responses]), rollout.temperature, chunk)
        parts = split_rounds(state, fed)
        scored = feed([TokenRun(run, prefix.model, state, parts, terms)], scored=True)
        state.close()
    found = _merged(run, sampled)
    again = _merged(run, replayed)
    differing = sorted(row for row, digest in found.items() if again.get(row, digest) != digest)
    if differing:
        row = differing[0]
        where = f"layer {row.layer}" if row.layer else "before the layers"
        return f"{where}, {row.operation} (token {row.position} of response {row.response})"
    return _in_the_head(run, responses, scored)


def _in_the_head(run: Run, responses: Sequence[Any], scored: list[list[Any]]) -> str | None:
    """Equal hidden states and unequal log-probabilities."""
    wanted = [x for response in responses for x in response.logprobs]
    unequal = any(
        float(value) != wanted[int(index)]
        for part in scored
        for values_2S, index_S in part
        for value, index in zip(values_2S[0].cpu().double(), index_S, strict=True)
    )
    return "from logits to log-probabilities" if any(run.runtime.gather_objects(unequal)) else None


def _merged(run: Run, found: dict[Row, bytes]) -> dict[Row, bytes]:
    """What all ranks hashed."""
    return {row: digest for part in run.runtime.gather_objects(found) for row, digest in part.items()}


@contextmanager
def _hashing(model: Any, replica: int) -> Iterator[dict[Row, bytes]]:
    """Hash what this stage's operations give each token, as long as the block lasts."""
    found: dict[Row, bytes] = {}
    layouts: list[TokenLayout] = []
    order: dict[str, int] = {}
    tp = model.pg_collection.tp

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        layouts[:] = [kwargs["packed_seq_params"].layout]

    def leave(name: str, layer: int, module: Any, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        layout = layouts[0]
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            return
        slots, first, part = layout.local_slots, layout.local_start, tp.rank()
        if x.shape[0] != slots:
            if x.shape[0] * tp.size() != slots:
                return
            first, part = first + tp.rank() * x.shape[0], 0
        number = order.setdefault(name, len(order))
        rows = x.detach().cpu().reshape(x.shape[0], -1).contiguous().view(torch.uint8).numpy()
        for slot in range(first, min(first + x.shape[0], layout.tokens)):
            branch = max(
                j for j, start in enumerate(layout.offsets[:-1]) if start <= slot and layout.lengths[j]
            )
            position = layout.starts[branch] + slot - layout.offsets[branch]
            row = Row(replica, position, layer, number, name, branch, part)
            found[row] = hashlib.blake2b(rows[slot - first].tobytes(), digest_size=8).digest()

    handles = [model.register_forward_pre_hook(enter, with_kwargs=True)]
    for name, module, layer in _operations(model):
        handles.append(module.register_forward_hook(partial(leave, name, layer)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _operations(model: Any) -> Iterator[tuple[str, Any, int]]:
    """Name, module and layer (1-based, of the whole model) of everything with an output for each token."""
    layers = {
        name: module.layer_number for name, module in model.named_modules() if hasattr(module, "is_moe_layer")
    }
    last = model.config.num_layers + 1
    for name, module in model.named_modules():
        if not name or any(part in f".{name}." for part in _UNCOMPARED):
            continue
        inside = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
        if name in layers:
            yield "the residual sum", module, layers[name]
        elif inside is not None:
            yield name.removeprefix(f"{inside}."), module, layers[inside]
        elif not any(prefix.startswith(f"{name}.") for prefix in layers):
            yield name, module, 0 if name.startswith("embedding") else last
