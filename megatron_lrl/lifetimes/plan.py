"""Bytes of one rank by lifetime, before anything is loaded.

    settings + architecture ─ planned run (meta device) ─ parameters, gradient buffers, optimizer state
                                                        ├ capture, replay, sweep of a short prompt ─ peak graphs
    layout of the prompt's chunks ──────────────────────┴ resident state and adjoint of the whole prompt

A graph does not depend on what is resident, so a prompt of a few chunks gives the peaks of a long one; what
is resident follows from how its tokens lie. Only a conventional pass, whose graph is the whole sequence, is
run at full length; it is one pass, whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron_lrl.attention.kernels import accumulate_dtype
from megatron_lrl.checkpoint.optimizer_state import prime
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.group import PromptGroup
from megatron_lrl.lifetimes.optim import build_optimizer, wrap_ddp
from megatron_lrl.lifetimes.plan_world import PlannedRuntime, planned_world, rehearsal
from megatron_lrl.lifetimes.replay import Branch, Replay, batches_of
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.models.build import build_model
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.runtime import DTYPES, Layout
from megatron_lrl.settings import Config
from megatron_lrl.state.advance import token_layout

_WIDE_WORD = 8  # bytes of a recorded per-token value
_FEW = 1  # layers of a stage whose passes are run; more are counted


@dataclass(frozen=True)
class Work:
    """The shape of a window: G responses of R tokens for each prompt of P tokens, K replayed at once."""

    prompt: int
    response: int
    group: int
    concurrent: int

    @property
    def at_once(self) -> int:
        """Responses in one graph: K, or the whole group if it is smaller."""
        return min(self.concurrent, self.group)


@dataclass(frozen=True)
class RankBytes:
    """Planned bytes of one rank.

    ``state`` and ``adjoint`` are those of one prompt under the contract; ``sampling_state`` what sampling keeps of it.
    ``replay_graph`` and ``sweep_graph`` are peaks of saved-for-backward bytes over all micro-batches in flight, with
    what replayed responses keep resident between the rounds of their chunks (LastKV).
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    reference: int
    window: int
    state: int
    adjoint: int
    sampling_state: int
    replay_graph: int
    sweep_graph: int
    resident_groups: int = 1

    @property
    def run(self) -> int:
        """The run-persistent lifetime."""
        return self.parameters + self.gradients + self.optimizer + self.reference

    @property
    def groups(self) -> int:
        """The prompt-group lifetime at its peak: all resident prefixes, one of them with its adjoint."""
        return max(self.resident_groups * self.state + self.adjoint, self.sampling_state)

    @property
    def replay(self) -> int:
        """The replay lifetime at its peak: one replay's graphs or one sweep's, whichever is larger."""
        return max(self.replay_graph, self.sweep_graph)

    @property
    def total(self) -> int:
        """Peak over a window."""
        return self.run + self.window + self.groups + self.replay

    def lifetimes(self) -> dict[str, int]:
        """By the names of `Ledger`."""
        return {"run": self.run, "window": self.window, "group": self.groups, "replay": self.replay}


class _Peaks(NamedTuple):
    """Saved-for-backward bytes."""

    replay: int
    sweep: int


def planned_run(config: Config, runtime: PlannedRuntime, arch: Architecture, optimizer: bool = True) -> Run:
    """One rank's run as `open_run` makes it, inside a `rehearsal`. The optimizer's moments exist."""
    dtype = DTYPES[config.model.dtype]
    model: Any = build_model(arch, runtime, dtype, config.parallel.sequence_parallel)
    run = Run(config, runtime, arch, model, version=1)
    shard = optimizer and runtime.groups.dp_cp.size() > 1
    run.model = wrap_ddp(model, runtime, shard)
    if optimizer:
        if config.loss.kl_coef > 0:
            run.reference = build_model(arch, runtime, dtype, config.parallel.sequence_parallel)
        run.optimizer, run.scheduler = build_optimizer(run.model, config, shard, gloo_groups=False)
        prime(run.optimizer)
    run.measure_run_bytes()
    return run


class Plan:
    """A rank's planned run, to be asked for windows of any shape, inside the block of `open_plan`."""

    def __init__(self, config: Config, runtime: PlannedRuntime, arch: Architecture, optimizer: bool = True) -> None:
        self.run = planned_run(config, runtime, arch, optimizer)
        self._runs: dict[int, Run] = {}  # layers of a stage -> a run with so many
        self._graphs: dict[tuple[str, Work], _Peaks] = {}

    @property
    def in_flight(self) -> int:
        """Graphs this stage may hold at once."""
        return self.run.runtime.layout.pp - self.run.runtime.pp_rank

    def bytes_of(self, work: Work, contract: str | None = None, recorded: bool = False) -> RankBytes:
        """Bytes of a window of this shape under a contract (default: the config's).

        ``recorded``: the responses exist already (`grad`), so nothing is sampled, and prompts are resident one by one.
        """
        contract = contract or self.run.config.prefix.contract
        config, dp = self.run.config, self.run.runtime.dp
        one_by_one = recorded or contract == "conventional" or self.run.reference is not None
        peaks = self._peaks(contract, work)
        state, adjoint = self.resident(work.prompt, contract)
        return RankBytes(
            stage=self.run.runtime.pp_rank,
            **self.run.ledger.parts,
            window=_WIDE_WORD * work.group * (2 * work.response + 1) * config.train.groups_per_update,
            state=state,
            adjoint=adjoint,
            sampling_state=0 if recorded else self.resident(work.prompt, "response_only")[0],
            replay_graph=peaks.replay,
            sweep_graph=peaks.sweep,
            resident_groups=1 if one_by_one else -(-config.train.groups_per_update // dp),
        )

    def resident(self, prompt: int, contract: str) -> tuple[int, int]:
        """Bytes of a prompt's state and of its adjoint on this rank."""
        if contract == "conventional" or prompt < 2:
            return 0, 0
        run, core = self.run, self.run.core(self.run.model)
        group = PromptGroup(run, "plan", range(prompt), contract)
        spans, live_from, empty = group.spans(), group.live_from, run.new_state(1)
        local = [token_layout(core, empty, [high - low]).local_tokens for low, high in spans]
        starts, layers = [low for low, _ in spans], len(core.decoder.layers)
        live = sum(n for n, low in zip(local, starts, strict=True) if low >= live_from)
        tokens = layers * sum(local)
        if (lastkv := run.arch.lastkv) is not None:
            # The last layer's pages of every chunk on every stage; own-layer pages only of the newest chunks and of
            # those that a sweep recomputes.
            chunks = [low // lastkv.chunk_size for low in starts]
            oldest = min(chunks[-1], live_from // lastkv.chunk_size if live else chunks[-1]) - 1
            own_layers = layers - 1 if core.post_process else layers
            own = sum(n for n, chunk in zip(local, chunks, strict=True) if chunk >= oldest)
            tokens, layers = sum(local) + own_layers * own, own_layers + 1
        config = core.config
        per_token = 2 * config.kv_channels * config.num_query_groups // config.tensor_model_parallel_size
        wide = accumulate_dtype(config.params_dtype)
        return tokens * per_token * config.params_dtype.itemsize, layers * live * per_token * wide.itemsize

    def _peaks(self, contract: str, work: Work) -> _Peaks:
        """Of a prompt of a few chunks and a stage of a few layers: all further layers add what one of them adds."""
        short = replace(work, prompt=self._short_prompt(work.prompt, contract), group=work.at_once * self.in_flight)
        if (contract, short) not in self._graphs:
            layers = len(self.run.core(self.run.model).decoder.layers)
            few, more = (self._rehearse(min(n, layers), contract, short) for n in (_FEW, _FEW + 1))
            self._graphs[contract, short] = _Peaks(
                *(a + max(0, layers - _FEW) * (b - a) for a, b in zip(few, more, strict=True))
            )
        return self._graphs[contract, short]

    def _rehearse(self, layers: int, contract: str, work: Work) -> _Peaks:
        run = self._with_layers(layers)
        branches = [Branch(BranchKey("plan", i), (0,) * work.response) for i in range(work.group)]
        batches = batches_of(branches, work.concurrent)
        run.ledger.start_window()
        with PromptGroup(run, "plan", (0,) * work.prompt, contract) as group:
            Replay(group).gradient(batches, [_no_loss] * len(batches))
            replay = run.ledger.peak["replay"]
            run.ledger.start_window()
            group.sweep()
            return _Peaks(replay, run.ledger.peak["replay"])

    def _with_layers(self, layers: int) -> Run:
        if layers == len(self.run.core(self.run.model).decoder.layers):
            return self.run
        if layers not in self._runs:
            run, pp = self.run, self.run.runtime.layout.pp
            arch = replace(run.arch, num_layers=layers * pp)
            dtype = DTYPES[run.config.model.dtype]
            model = build_model(arch, run.runtime, dtype, run.config.parallel.sequence_parallel)
            self._runs[layers] = Run(run.config, run.runtime, arch, model, version=1)
        return self._runs[layers]

    def _short_prompt(self, prompt: int, contract: str) -> int:
        """A prompt that ends as this one and fills the pipeline with its chunks."""
        if contract == "conventional":
            return prompt
        unit, chunks = self.run.config.prefix.chunk_size, self.in_flight + 1
        if (lastkv := self.run.arch.lastkv) is not None:
            unit, chunks = math.lcm(unit, lastkv.chunk_size), chunks + 1
        prefix = prompt - 1
        return 1 + (prefix if prefix < (chunks + 1) * unit else prefix % unit + chunks * unit)


def _no_loss(logprob_S: torch.Tensor, _entropy: torch.Tensor, _index: torch.Tensor) -> tuple[torch.Tensor, dict]:
    return logprob_S.sum(), {}


@contextmanager
def open_plan(config: Config, runtime: PlannedRuntime, arch: Architecture, optimizer: bool = True) -> Iterator[Plan]:
    """A plan for the rank whose place ``runtime`` is. Everything asked of it must be asked inside the block."""
    with rehearsal(runtime.layout.pp - runtime.pp_rank):
        yield Plan(config, runtime, arch, optimizer)


@contextmanager
def open_plan_of_stage(config: Config, arch: Architecture, world_size: int, stage: int) -> Iterator[Plan]:
    """A plan for the first rank of a pipeline stage, whose share of a prompt is the largest, in a planned world.

    Raises `UserError` if the layout does not divide the world.
    """
    parallel = config.parallel
    layout = Layout(parallel.tp, parallel.cp, parallel.pp, parallel.ep)
    rank = stage * (world_size // layout.pp)  # pipeline ranks are outermost
    with planned_world(layout, world_size, rank) as runtime, open_plan(config, runtime, arch) as plan:
        yield plan


def stages_that_differ(pp: int) -> Sequence[int]:
    """Pipeline stages of each kind: the first (embedding, most graphs), the second, the last (head)."""
    return sorted({0, min(1, pp - 1), pp - 1})
