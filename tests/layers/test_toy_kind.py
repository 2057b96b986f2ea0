"""Claim: a layer kind is one room and one line of the registry. A toy kind (exponentially decayed linear attention),
all of which stands in this file, is converted, scored, trained under all four contracts, forked and planned.

Why the tests show it: the verbs run on a model whose every second layer is of the toy kind; scores and gradients are
those of a plain float64 model with its own statement of the recurrence; what the sampler recorded is what scoring
finds; planned bytes of every lifetime that is counted are the measured ones, with restarts and without.
Not shown: several ranks (the toy is not split), Transformer Engine, a reader of config.json (the test
stands in for it).

Legend: m slots of an advance, b branches, n heads, k key dim, v value dim, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from harness import World
from oracle import plain_fp64
from oracle.compare import compare_tensors
from oracle.tiny_models import write_case
from oracle.trajectories import window, write_jsonl
from plan import plan_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lrl.config import load_config
from megatron_lrl.layers.advance import AdvanceContext
from megatron_lrl.layers.architecture import ATTENTION, Architecture
from megatron_lrl.layers.conversion import Made, Row, Split, norm
from megatron_lrl.layers.kind import Operations, Place
from megatron_lrl.layers.kinds import KINDS
from megatron_lrl.layers.recurrent import RecurrentKind, RecurrentLayer
from megatron_lrl.models import hf_config
from megatron_lrl.plan.bytes import Work, open_plan_of_stage
from megatron_lrl.rl import verbs
from megatron_lrl.runtime import Layout, runtime_scope

NAME = "decay"
CONTRACTS = ("conventional", "response_only", "exact", "truncated")
LIVE = 9
SHAPE = ((37, (1, 7, 2)), (11, (13, 5)), (1, (4,)))
WORK = (61, 11, 3, 2)


# ------------------------------------------------------------------------------------------- the kind's room


@dataclass(frozen=True)
class Sizes:
    heads: int
    key_dim: int
    value_dim: int


class State(NamedTuple):
    state_bnkv: Tensor


class DecayLayer(RecurrentLayer[State]):
    """S = a S + k v', read by q."""


class Decay(torch.nn.Module):
    """Stands in the place of self-attention."""

    def __init__(self, submodules: Any = None, *, config: Any, layer_number: int, sizes: Sizes, **_: Any):
        super().__init__()
        self.layer_number, self.sizes = layer_number, sizes
        n, hidden = sizes.heads, config.hidden_size
        shapes = {"q": (n * sizes.key_dim, hidden), "k": (n * sizes.key_dim, hidden)}
        shapes |= {"v": (n * sizes.value_dim, hidden), "out": (hidden, n * sizes.value_dim), "rate": (n,)}
        device = torch.cuda.current_device()
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=config.params_dtype, device=device)
            self.register_parameter(name, torch.nn.Parameter(empty))

    def forward(
        self, hidden: Tensor, _mask: Any = None, *, packed_seq_params: AdvanceContext, **_: Any
    ) -> Any:
        advance, sizes, x_mH = packed_seq_params, self.sizes, hidden.squeeze(1)
        layer = advance.state.layer(self.layer_number, DecayLayer)
        branches, layout = advance.state.branches, advance.layout
        size = (branches, sizes.heads, sizes.key_dim, sizes.value_dim)
        before = layer.read(x_mH, branches, lambda: State(x_mH.new_zeros(size)))
        q, k, v = ((x_mH @ w.T).unflatten(-1, (sizes.heads, -1)) for w in (self.q, self.k, self.v))
        decay_n = torch.sigmoid(self.rate)[:, None, None]
        outputs, states = [], []
        for state_nkv, offset, length in zip(before.state_bnkv, layout.offsets, layout.lengths, strict=False):
            for t in range(offset, offset + length):
                state_nkv = decay_n * state_nkv + k[t].unsqueeze(-1) * v[t].unsqueeze(-2)
                outputs.append((q[t].unsqueeze(-2) @ state_nkv).flatten())
            states.append(state_nkv)
        layer.commit(State(torch.stack(states)), keep=advance.state.restarts_here)
        o_m = torch.stack(outputs + [torch.zeros_like(outputs[0])] * (len(x_mH) - len(outputs)))
        return (o_m @ self.out.T).unsqueeze(1), None

    def grow_state(self, normed: Tensor, _angles: Any, advance: AdvanceContext) -> None:
        self(normed, packed_seq_params=advance)


def sizes_of(arch: Architecture) -> Sizes:
    sizes: Sizes = arch.sizes[NAME]
    return sizes


def _row(name: str, width: str, along: int = 0) -> Row:
    def made(arch: Architecture) -> Made:
        rows = sizes_of(arch).heads * getattr(sizes_of(arch), width)
        shape = (rows, arch.hidden_size) if not along else (arch.hidden_size, rows)
        return Made((shape,), Split(rows, along=along))

    return Row(f"self_attention.{name}", (f"self_attn.decay_{name}",), made)


class DecayKind(RecurrentKind):
    name, title, fused_norm = NAME, "decayed linear attention", "q"
    rows: ClassVar = (
        norm("input_layernorm.weight", "input_layernorm.weight"),
        *(_row(name, "key_dim") for name in "qk"),
        _row("v", "value_dim"),
        _row("out", "value_dim", along=1),
        Row(
            "self_attention.rate",
            ("self_attn.decay_rate",),
            lambda arch: Made(((sizes_of(arch).heads,),), Split(sizes_of(arch).heads)),
        ),
    )

    def install(self, submodules: Any, arch: Architecture, transformer_engine: bool, norm: Any) -> None:
        from megatron.core.transformer.spec_utils import ModuleSpec

        submodules.self_attention = ModuleSpec(module=Decay, params={"sizes": sizes_of(arch)})

    def state_bytes(self, place: Place, dtype: torch.dtype) -> int:
        sizes = sizes_of(place.arch)
        return sizes.heads * sizes.key_dim * sizes.value_dim * dtype.itemsize

    def operations(self, arch: Architecture) -> Operations:
        s = sizes_of(arch)
        projected = s.heads * (2 * s.key_dim + 2 * s.value_dim)
        return Operations(2.0 * arch.hidden_size * projected, scan=4.0 * s.heads * s.key_dim * s.value_dim)


# ------------------------------------------------------------------------------------------------- the tests

SIZES = Sizes(heads=3, key_dim=4, value_dim=5)


def is_decay(layer: int) -> bool:
    return layer % 2 == 1


class Plain(plain_fp64.PlainModel):
    """The same layer, stated again: o_t = sum of a^(t - s) (q_t . k_s) v_s over s <= t, and what a state says."""

    def attention(self, h_SH: Tensor, at: str, angles_SR: Any, start: int, past: Any) -> Any:
        w = self.weights
        if at + "decay_q" not in w:
            return super().attention(h_SH, at, angles_SR, start, past)
        q, k, v = ((h_SH @ w[f"{at}decay_{x}"].T).unflatten(1, (SIZES.heads, -1)) for x in "qkv")
        a_n, steps = torch.sigmoid(w[at + "decay_rate"]), torch.arange(len(h_SH))
        ages_ts = steps[:, None] - steps[None]
        powers_nts = a_n[:, None, None] ** ages_ts.clamp(min=0) * (ages_ts >= 0)
        o = torch.einsum("tnk,snk,nts,snv->tnv", q, k, powers_nts, v)
        last = torch.einsum("snk,ns,snv->nkv", k, powers_nts[:, -1], v)
        if past is not None:
            faded_tn = a_n ** (steps[:, None] + 1)
            o = o + torch.einsum("tnk,tn,nkv->tnv", q, faded_tn, past[0])
            last = last + faded_tn[-1][:, None, None] * past[0]
        return o.flatten(1) @ w[at + "decay_out"].T, (last,)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The line of the registry, and what a config reader would say."""
    monkeypatch.setitem(KINDS, NAME, DecayKind())
    plain = hf_config.family_fields

    def fields(raw: Any, family: str, num_layers: int, source: str) -> dict[str, Any]:
        mixers = tuple(NAME if is_decay(layer) else ATTENTION for layer in range(num_layers))
        return {**plain(raw, family, num_layers, source), "mixers": mixers, "sizes": {NAME: SIZES}}

    monkeypatch.setattr(hf_config, "family_fields", fields)
    monkeypatch.setattr(plain_fp64, "PlainModel", Plain)
    yield


@pytest.fixture(scope="module")
def hf(session_dir: Path) -> Path:
    """A tiny llama whose odd layers are of the toy kind."""
    source, folder = write_case(session_dir / "hf", "llama-tied-llama3"), session_dir / "toy"
    folder.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    draw, tensors = torch.Generator().manual_seed(4), load_file(source / "model.safetensors")
    hidden, wide = config["hidden_size"], SIZES.heads * SIZES.value_dim
    shapes = dict.fromkeys("qk", (SIZES.heads * SIZES.key_dim, hidden))
    shapes |= {"v": (wide, hidden), "out": (hidden, wide), "rate": (SIZES.heads,)}
    for layer in filter(is_decay, range(config["num_hidden_layers"])):
        at = f"model.layers.{layer}.self_attn."
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(at)}
        for name, shape in shapes.items():
            tensors[f"{at}decay_{name}"] = torch.randn(shape, generator=draw) * (0.3 if len(shape) > 1 else 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def settings(hf: Path, *more: str) -> list[str]:
    return [
        f'model.hf="{hf}"', "prefix.chunk_size=13", "replay.concurrent=2", "replay.check_poison=true",
        f"prefix.truncate_tokens={LIVE}", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("snapshots", [0, 5 * 960], ids=["every chunk", "few restarts"])
def test_gradients_are_those_of_plain_autograd(hf: Path, tmp_path: Path, snapshots: int, report: Any) -> None:
    groups = window(3, shape=SHAPE)
    trajectories = str(write_jsonl(tmp_path / "t.jsonl", groups))
    with runtime_scope(Layout()) as runtime:
        for contract in CONTRACTS if not snapshots else ("exact",):
            out = tmp_path / f"{contract}.safetensors"
            more = [
                "model.dtype=float64",
                f"prefix.contract={contract}",
                f"prefix.snapshot_bytes={snapshots}",
            ]
            verbs.grad(load_config("/dev/null", settings(hf, *more)), runtime, trajectories, str(out))
            live = {"response_only": 0, "truncated": LIVE}.get(contract)
            expected = plain_fp64.grad(hf, groups, detach_prefix=live is not None, live=live or 0)
            assert any(w.any() for name, w in expected.items() if "decay_rate" in name)
            comparison = compare_tensors(load_file(out), expected)
            report(contract, comparison)
            comparison.require(1e-10, 1e-8)


def test_forks_score_as_the_plain_model_and_sample_what_they_score(hf: Path, tmp_path: Path) -> None:
    groups = window(3, shape=SHAPE)
    config = load_config("/dev/null", settings(hf, "model.dtype=float64"))
    trajectories = str(write_jsonl(tmp_path / "t.jsonl", groups))
    with runtime_scope(Layout()) as runtime:
        verbs.score(config, runtime, trajectories, str(tmp_path / "s.jsonl"))
        scored = [json.loads(line)["logprobs"] for line in (tmp_path / "s.jsonl").read_text().splitlines()]
        for ours, theirs in zip(scored, plain_fp64.score(hf, groups), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a == pytest.approx(b, abs=1e-9)


def test_planned_bytes_are_measured_bytes(hf: Path) -> None:
    for snapshots in (0, 4 * 480):
        chosen = settings(hf, f"prefix.snapshot_bytes={snapshots}")
        found = plan_ranks.measured(World(), chosen, ("exact", "truncated"), WORK)
        config = load_config("/dev/null", chosen)
        with open_plan_of_stage(config, hf_config.read_architecture(hf), 1, 0) as plan:
            for contract in ("exact", "truncated"):
                planned = plan.bytes_of(Work(*WORK), contract, recorded=True)
                ours = {**vars(planned), "group": planned.groups}
                for name in ("parameters", "gradients", "optimizer", "state", "group"):
                    assert ours[name] == found[contract][name], (snapshots, contract, name)
                assert planned.replay == pytest.approx(found[contract]["replay"], rel=0.1)
