"""LastKV attention in a hybrid of Gated DeltaNet and attention, from its definition, under plain autograd in fp64.

The last layer whose keys and values serve as history is the last *attention* layer; only attention layers follow the
rules (`lastkv_reference`), recurrent layers run token by token as always. A chunk is processed layer by layer.

Shapes: S tokens of a chunk, T tokens so far, H hidden, N query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from oracle.lastkv_reference import attend_chunk, constant_tokens, gate_name, hold
from oracle.objective import Objective, advantages, window_term
from oracle.plain_fp64 import PlainModel, linear, rotate
from oracle.plain_layers import DeltaState, delta_net
from oracle.trajectories import Group

KeysValues = tuple[torch.Tensor, torch.Tensor]


class HybridLastKV(PlainModel):
    """A hybrid's directory that holds gates; `chunk`: C."""

    def __init__(self, hf_dir: Path | str, chunk: int) -> None:
        super().__init__(hf_dir)
        self.chunk = chunk
        self.kinds: list[str] = self.config["layer_types"]
        self.last = max(i for i, kind in enumerate(self.kinds) if kind == "full_attention")

    def logits_all(self, ids: Sequence[int], constant: int = 0) -> torch.Tensor:
        """Logits [T, V]; what tokens at positions < `constant` left for others is held constant."""
        w = self.weights
        done: list[dict[int, KeysValues]] = []
        states: dict[int, DeltaState | None] = {}
        logits = []
        for start in range(0, len(ids), self.chunk):
            part = ids[start : start + self.chunk]
            x_SH = w[self.prefix + "embed_tokens.weight"][torch.tensor(part)]
            kept: dict[int, KeysValues] = {}
            for layer, kind in enumerate(self.kinds):
                at = f"{self.prefix}layers.{layer}."
                h_SH = self.norm(x_SH, at + "input_layernorm")
                if kind == "linear_attention":
                    y_SH, states[layer] = self.recur(h_SH, at, states.get(layer), constant - start)
                else:
                    y_SH = self.lastkv(h_SH, at, layer, start, constant, done, kept)
                x_SH = x_SH + y_SH
                x_SH = x_SH + self.mlp(self.norm(x_SH, at + "post_attention_layernorm"), at + "mlp.")
            done.append(kept)
            head = w.get("lm_head.weight", w[self.prefix + "embed_tokens.weight"])
            logits.append(self.norm(x_SH, self.prefix + "norm") @ head.T)
        return torch.cat(logits)

    def recur(
        self, h_SH: torch.Tensor, at: str, past: DeltaState | None, constant: int
    ) -> tuple[torch.Tensor, DeltaState]:
        """The recurrent layer; its state behind the first `constant` of these tokens is held."""
        cut = min(max(constant, 0), len(h_SH))
        outputs, state = [], past
        for rows, held in ((h_SH[:cut], True), (h_SH[cut:], False)):
            if len(rows):
                y_SH, state = delta_net(rows, self.weights, at + "linear_attn.", self.config, state)
                outputs.append(y_SH)
                state = tuple(x.detach() for x in state) if held else state
        assert state is not None
        return torch.cat(outputs), state

    def lastkv(
        self, h_SH: torch.Tensor, at: str, layer: int, start: int, constant: int,
        done: Sequence[dict[int, KeysValues]], kept: dict[int, KeysValues],
    ) -> torch.Tensor:  # fmt: skip
        """An attention layer over history, blended previous chunk and open chunk."""
        attn = at + "self_attn."
        q_SND, k_SGD, v_SGD = (self.heads(h_SH, attn + which) for which in ("q", "k", "v"))
        q_SND, gate_SND = q_SND.flatten(1).unflatten(1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        angles = self.rotation(start, len(h_SH))
        q_SND = rotate(self.norm(q_SND, attn + "q_norm"), *angles)
        k_SGD = rotate(self.norm(k_SGD, attn + "k_norm"), *angles)
        kept[layer] = hold(k_SGD, constant - start), hold(v_SGD, constant - start)
        seen = [torch.cat([*self.history(done, layer, i), kept[layer][i]]) for i in (0, 1)]
        o_SND = attend_chunk(q_SND, *seen) * torch.sigmoid(gate_SND)
        return linear(o_SND.flatten(1), self.weights, attn + "o_proj")

    def history(self, done: Sequence[dict[int, KeysValues]], layer: int, which: int) -> list[torch.Tensor]:
        """Keys (`which` 0) or values (1) of the completed chunks as `layer` reads them."""
        if not done:
            return []
        own, last = done[-1][layer][which], done[-1][self.last][which]
        alpha = torch.sigmoid(self.weights[gate_name(layer)])[:, None]
        previous = last if layer == self.last else (1 - alpha) * own + alpha * last
        return [*(chunk[self.last][which] for chunk in done[:-1]), previous]


def grad(
    hf_dir: Path | str, groups: Sequence[Group], contract: str, chunk: int, live: int = 0
) -> dict[str, torch.Tensor]:
    """The window's gradient by parameter name, gates included; `live`: newest live prefix tokens of `truncated`."""
    objective: Any = Objective()
    model = HybridLastKV(hf_dir, chunk)
    for group in groups:
        prompt = group["prompt_ids"]
        constant = constant_tokens(contract, len(prompt), live)
        for response, advantage in zip(
            group["responses"], advantages(group, objective.advantage), strict=True
        ):
            ids = response["ids"]
            logits_RV = model.logits_all([*prompt, *ids[:-1]], constant)[-len(ids) :]
            logprobs_R = torch.log_softmax(logits_RV, -1)[torch.arange(len(ids)), torch.tensor(ids)]
            window_term(logprobs_R, groups, response, advantage, objective).backward()
    return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in model.weights.items()}
