"""LastKV attention from its definition, twice, independent of the package.

A token at position p belongs to chunk c = p // C. In layer ℓ (of L), while it is processed, it reads of a token j ≤ p

    j // C ≤ c − 2      K^L, V^L                              the last layer's, after its QK-norm and RoPE at position j
    j // C = c − 1      (1 − α) K^ℓ + α K^L, same for V       α = sigmoid(gate), per layer and KV head
    j // C = c          K^ℓ, V^ℓ                              its own layer's

and without blending K^L, V^L of chunk c − 1 too. `TokenByToken` does just that, one token at a time, in fp64.
`ChunkParallel` does it a chunk at a time under plain autograd, in fp32 or fp64, for gradients. Norms, RoPE and MLP
are those of `plain_fp64`.

Shapes: S tokens of a chunk, T tokens so far, H hidden, N query heads, G key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from oracle.objective import Objective, advantages, window_term
from oracle.plain_fp64 import PlainModel, linear, rms_norm, rotate
from oracle.trajectories import Group

Gates = Mapping[str, torch.Tensor]
Rows = list[torch.Tensor]  # one [G, D] a token


def gate_name(layer: int) -> str:
    """The gate of a 0-based layer, as Hugging Face directories name it."""
    return f"model.layers.{layer}.self_attn.lastkv_gate"


def make_gates(seed: int, layers: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Logits of α, spread so that every α differs and none is near 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    return {gate_name(i): torch.randn(kv_heads, generator=generator) - 0.5 for i in range(layers)}


class LastKVModel(PlainModel):
    """Weights of a dense Hugging Face directory and gates; `chunk`: C; `blend`: whether the previous chunk is blended.

    Without `gates` the directory holds them.
    """

    def __init__(
        self,
        hf_dir: Path | str,
        gates: Gates | None,
        chunk: int,
        blend: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(hf_dir)
        wide = {**self.weights, **(gates or {})}
        self.weights = {name: w.detach().to(dtype).requires_grad_() for name, w in wide.items()}
        self.chunk, self.blend, self.dtype = chunk, blend, dtype
        self.layers: int = self.config["num_hidden_layers"]
        self.eps: float = self.config["rms_norm_eps"]

    def project(
        self, x_SH: torch.Tensor, layer: int, start: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [S, N, D], keys and values [S, G, D] of tokens from position `start`, after QK-norm and RoPE."""
        w, at = self.weights, f"model.layers.{layer}."
        h_SH = rms_norm(x_SH, w[at + "input_layernorm.weight"], self.eps)
        q, k, v = (self.heads(h_SH, at + f"self_attn.{which}") for which in ("q", "k", "v"))
        if at + "self_attn.q_norm.weight" in w:
            q = rms_norm(q, w[at + "self_attn.q_norm.weight"], self.eps)
            k = rms_norm(k, w[at + "self_attn.k_norm.weight"], self.eps)
        cos_SD, sin_SD = (x.to(self.dtype) for x in self.rotation(start, x_SH.shape[0]))
        return rotate(q, cos_SD, sin_SD), rotate(k, cos_SD, sin_SD), v

    def close_layer(self, x_SH: torch.Tensor, o_SND: torch.Tensor, layer: int) -> torch.Tensor:
        """The layer's output [S, H] from its input and its attention."""
        w, at = self.weights, f"model.layers.{layer}."
        x_SH = x_SH + linear(o_SND.flatten(1), w, at + "self_attn.o_proj")
        h_SH = rms_norm(x_SH, w[at + "post_attention_layernorm.weight"], self.eps)
        gate_SF, up_SF = linear(h_SH, w, at + "mlp.gate_proj"), linear(h_SH, w, at + "mlp.up_proj")
        return x_SH + linear(gate_SF * torch.sigmoid(gate_SF) * up_SF, w, at + "mlp.down_proj")

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """[S, H]"""
        return self.weights["model.embed_tokens.weight"][torch.tensor(ids)]

    def logits(self, x_SH: torch.Tensor) -> torch.Tensor:
        """[S, V]"""
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return rms_norm(x_SH, self.weights["model.norm.weight"], self.eps) @ head.T

    def alpha(self, layer: int) -> torch.Tensor:
        """The blend's weight of the last layer, [G, 1]; 1 without blending."""
        gate = self.weights[gate_name(layer)]
        return torch.sigmoid(gate)[:, None] if self.blend else torch.ones_like(gate)[:, None]


class TokenByToken(LastKVModel):
    """The definition, one token at a time."""

    @torch.no_grad()
    def forward_all(self, ids: Sequence[int], chunk_of: Sequence[int] | None = None) -> torch.Tensor:
        """Logits [T, V] of every position. `chunk_of` replaces p // C, to show what other boundaries would give."""
        k: list[Rows] = [[] for _ in range(self.layers)]  # k[layer][position]: [G, D]
        v: list[Rows] = [[] for _ in range(self.layers)]
        last, logits = self.layers - 1, []
        chunk = [p // self.chunk for p in range(len(ids))] if chunk_of is None else chunk_of
        for p, token in enumerate(ids):
            x_1H = self.embed([token])
            for layer in range(self.layers):
                q_1ND, k_1GD, v_1GD = self.project(x_1H, layer, p)
                k[layer].append(k_1GD[0])
                v[layer].append(v_1GD[0])
                keys, values = [], []
                for j in range(p + 1):
                    for own, seen in ((k, keys), (v, values)):
                        if chunk[j] == chunk[p]:
                            seen.append(own[layer][j])
                        elif chunk[j] == chunk[p] - 1:
                            alpha = self.alpha(layer)
                            seen.append((1 - alpha) * own[layer][j] + alpha * own[last][j])
                        else:
                            seen.append(own[last][j])
                x_1H = self.close_layer(
                    x_1H, attend_one(q_1ND, torch.stack(keys), torch.stack(values)), layer
                )
            logits.append(self.logits(x_1H))
        return torch.cat(logits)

    def score(self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities [R] of a response."""
        logits_RV = self.forward_all([*prompt, *response[:-1]])[-len(response) :]
        return torch.log_softmax(logits_RV / temperature, -1)[
            torch.arange(len(response)), torch.tensor(response)
        ]


def attend_one(q_1ND: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
    """Attention [1, N, D] of one token over T keys; query head n reads key-value head n // (N / G)."""
    repeat = q_1ND.shape[1] // k_TGD.shape[1]
    heads = []
    for n in range(q_1ND.shape[1]):
        k_TD, v_TD = k_TGD[:, n // repeat], v_TGD[:, n // repeat]
        heads.append(torch.softmax(k_TD @ q_1ND[0, n] / math.sqrt(q_1ND.shape[-1]), 0) @ v_TD)
    return torch.stack(heads)[None]


class ChunkParallel(LastKVModel):
    """The same a chunk at a time, with its graph."""

    def forward_chunks(self, ids: Sequence[int], constant: int = 0) -> torch.Tensor:
        """Logits [T, V]. What tokens at positions < `constant` left for others to read (keys and values, own and
        last) is held constant; α stays live."""
        done: list[
            list[tuple[torch.Tensor, torch.Tensor]]
        ] = []  # per completed chunk, per layer: k, v [S, G, D]
        logits = []
        for start in range(0, len(ids), self.chunk):
            part = ids[start : start + self.chunk]
            x_SH, kept = self.embed(part), []
            for layer in range(self.layers):
                q_SND, k_SGD, v_SGD = self.project(x_SH, layer, start)
                kept.append(tuple(hold(x, constant - start) for x in (k_SGD, v_SGD)))
                k_TGD, v_TGD = (torch.cat([*self.past(done, layer, i), kept[-1][i]]) for i in (0, 1))
                x_SH = self.close_layer(x_SH, attend_chunk(q_SND, k_TGD, v_TGD), layer)
            done.append(kept)
            logits.append(self.logits(x_SH))
        return torch.cat(logits)

    def past(
        self, done: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], layer: int, which: int
    ) -> list[torch.Tensor]:
        """Keys (`which` 0) or values (1) of the completed chunks as `layer` reads them."""
        if not done:
            return []
        own, last, alpha = done[-1][layer][which], done[-1][-1][which], self.alpha(layer)
        # At the last layer both sides are one tensor, so its gate has no influence.
        previous = last if layer == self.layers - 1 else (1 - alpha) * own + alpha * last
        return [*(chunk[-1][which] for chunk in done[:-1]), previous]

    def logprobs(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0, constant: int = 0
    ) -> torch.Tensor:
        """Log-probabilities [R] of the response, with their graph."""
        logits_RV = self.forward_chunks([*prompt, *response[:-1]], constant)[-len(response) :]
        return torch.log_softmax(logits_RV / temperature, -1)[
            torch.arange(len(response)), torch.tensor(response)
        ]


def hold(x_SGD: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first `tokens` rows without their graph."""
    if tokens <= 0:
        return x_SGD
    return torch.cat([x_SGD[:tokens].detach(), x_SGD[tokens:]])


def attend_chunk(q_SND: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
    """Attention [S, N, D] of the last S of T tokens, causal."""
    repeat, s, t = q_SND.shape[1] // k_TGD.shape[1], q_SND.shape[0], k_TGD.shape[0]
    k_TND, v_TND = k_TGD.repeat_interleave(repeat, 1), v_TGD.repeat_interleave(repeat, 1)
    scores_NST = torch.einsum("snd,tnd->nst", q_SND, k_TND) / math.sqrt(q_SND.shape[-1])
    later_ST = torch.ones(s, t, dtype=torch.bool).triu(t - s + 1)
    return torch.einsum("nst,tnd->snd", torch.softmax(scores_NST.masked_fill(later_ST, -math.inf), -1), v_TND)


def constant_tokens(contract: str, prompt: int, live: int) -> int:
    """Tokens at the front whose state is constant; the prefix is the prompt without its last token."""
    prefix = prompt - 1
    return {
        "conventional": 0,
        "exact": 0,
        "response_only": prefix,
        "truncated": max(0, prefix - live),
    }[contract]


def grad(
    hf_dir: Path | str,
    gates: Gates | None,
    groups: Sequence[Group],
    contract: str,
    chunk: int,
    blend: bool = True,
    live: int = 0,
    dtype: torch.dtype = torch.float64,
    objective: Objective | None = None,
) -> dict[str, torch.Tensor]:
    """The window's gradient by parameter name, gates included; `live`: newest live prefix tokens of `truncated`."""
    objective = objective or Objective()
    model = ChunkParallel(hf_dir, gates, chunk, blend, dtype)
    for group in groups:
        prompt = group["prompt_ids"]
        constant = constant_tokens(contract, len(prompt), live)
        for response, advantage in zip(
            group["responses"], advantages(group, objective.advantage), strict=True
        ):
            logprobs_R = model.logprobs(prompt, response["ids"], objective.temperature, constant)
            window_term(logprobs_R, groups, response, advantage, objective).backward()
    return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in model.weights.items()}
