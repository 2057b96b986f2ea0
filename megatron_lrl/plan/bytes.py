"""Bytes of one rank by lifetime, before anything is loaded.

    settings + architecture ─ planned run (meta device) ─ parameters, gradient buffers, optimizer state
                                                        ├ capture, replay, sweep of a short prompt ─ peak graphs
    layout of the prompt's chunks ──────────────────────┴ resident state and adjoint of the whole prompt

What is resident follows from how the prompt's tokens lie, which is counted; what graphs hold is measured in passes of a
few chunks through a few layers (`plan_graphs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_lrl.adapters.adapt import Base, adapt
from megatron_lrl.checkpoint.hf_export import gradient_file_bytes
from megatron_lrl.checkpoint.optimizer_state import prime, saving_bytes
from megatron_lrl.layers.advance import local_keys
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.kind import Capture, Place
from megatron_lrl.layers.kinds import kinds_of
from megatron_lrl.lifetimes.ledger import Ledger, process_bytes
from megatron_lrl.lifetimes.open import adapter_dtype, adapter_spec
from megatron_lrl.lifetimes.optim import build_optimizer, wrap_ddp
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.room import Room
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.models.build import configured_model
from megatron_lrl.plan.graphs import Graphs, Work
from megatron_lrl.plan.world import PlannedRuntime, planned_world, rehearsal
from megatron_lrl.precision import accumulate_dtype
from megatron_lrl.runtime import Layout
from megatron_lrl.settings import Config

_WIDE_WORD = 8  # bytes of a recorded per-token value


@dataclass(frozen=True)
class RankBytes:
    """Planned bytes of one rank.

    ``state`` (with its snapshots) and ``adjoint`` are those of one prompt under the contract;
    ``sampling_state`` what sampling keeps of it; ``refilled`` what a sweep makes again at a time
    (prefix.snapshot_bytes). ``replay_graph`` and ``sweep_graph`` are peaks of saved-for-backward bytes over all
    micro-batches in flight, with what replayed responses keep resident between their chunks. ``decoding``: the tokens
    of sampled responses (rollout.decode_bytes). ``saving`` and ``gradient_file``: what a checkpoint and the file of
    `grad` take on the host while they are written.
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
    refilled: int = 0
    decoding: int = 0
    saving: int = 0
    gradient_file: int = 0
    libraries: int = 0  # what a process of this machine holds besides; 0 where there are devices
    gathering: int = 0  # the copy that gloo makes of the parameters while it gathers stepped shards

    @property
    def run(self) -> int:
        """The run-persistent lifetime."""
        return self.parameters + self.gradients + self.optimizer + self.reference

    @property
    def groups(self) -> int:
        """The prompt-group lifetime at its peak: all resident prefixes, one of them with its adjoint."""
        return max(self.resident_groups * self.state + self.adjoint + self.refilled, self.sampling_state)

    @property
    def replay(self) -> int:
        """The replay lifetime at its peak: the graphs of one replay or one sweep, or what decodes together."""
        return max(self.replay_graph, self.sweep_graph, self.decoding)

    @property
    def total(self) -> int:
        """Peak over a window, or while the checkpoint after it is written."""
        return self.run + max(self.window + self.groups + self.replay, self.saving)

    @property
    def process(self) -> int:
        """Peak with the libraries."""
        return max(self.total, self.run + self.gathering) + self.libraries

    def lifetimes(self) -> dict[str, int]:
        """By the names of `Ledger`."""
        return {"run": self.run, "window": self.window, "group": self.groups, "replay": self.replay}


def planned_run(config: Config, runtime: PlannedRuntime, arch: Architecture, optimizer: bool = True) -> Run:
    """One rank's run as `open_run` makes it, inside a `rehearsal`. The optimizer's moments exist."""
    libraries = process_bytes()
    model: Any = configured_model(config, arch, runtime)
    if (spec := adapter_spec(config, arch)) is not None:
        adapt(model, arch, spec, runtime, adapter_dtype(config))
    run = Run(config, runtime, arch, model, version=1, ledger=Ledger(libraries=libraries))
    shard = optimizer and runtime.groups.dp_cp.size() > 1
    run.model = wrap_ddp(model, runtime, shard)
    if optimizer:
        if config.loss.kl_coef > 0:
            run.reference = configured_model(config, arch, runtime) if model.adapters is None else Base(model)
        run.optimizer, run.scheduler = build_optimizer(run.model, config, shard, gloo_groups=False)
        prime(run.optimizer)
    run.measure_run_bytes()
    return run


class Plan:
    """A rank's planned run, to be asked for windows of any shape, inside the block of `open_plan`."""

    def __init__(
        self, config: Config, runtime: PlannedRuntime, arch: Architecture, optimizer: bool = True
    ) -> None:
        self.run = planned_run(config, runtime, arch, optimizer)
        self._graphs = Graphs(self.run)
        self._groups: dict[tuple[int, str], PromptGroup] = {}

    def bytes_of(self, work: Work, contract: str | None = None, recorded: bool = False) -> RankBytes:
        """Bytes of a window of this shape under a contract (default: the config's).

        ``recorded``: the responses exist already (`grad`), so nothing is sampled, and prompts are resident one by one.
        """
        contract = contract or self.run.config.prefix.contract
        config, dp = self.run.config, self.run.runtime.dp
        one_by_one = recorded or contract == "conventional" or self.run.reference is not None
        peaks = self._graphs.peaks(contract, work)
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
            refilled=self.refilled(work.prompt, contract),
            saving=saving_bytes(self.run.model, self.run.runtime) if self.run.optimizer is not None else 0,
            libraries=self.run.ledger.libraries,
            gathering=self.run.ledger.parts["parameters"] if self._steps_shards else 0,
            gradient_file=gradient_file_bytes(self.run.model, self.run.arch, self.run.precision.accumulation),
            decoding=0 if recorded else self.decoding(work),
        )

    @property
    def _steps_shards(self) -> bool:
        return self.run.optimizer is not None and self.run.runtime.groups.dp_cp.size() > 1

    def decoding(self, work: Work) -> int:
        """Bytes of the responses' own tokens, as many at once as decode together."""
        config, prefix = self.run.config, work.prompt - 1
        room = Room(self.run, work.response)
        branches = work.group * -(-config.train.groups_per_update // self.run.runtime.dp)
        return room.branch(prefix) * room.at_once(prefix, branches, config.rollout.decode_bytes)

    def resident(self, prompt: int, contract: str) -> tuple[int, int]:
        """Bytes of a prompt's state when the first replay begins, and of its adjoint at its peak, on this rank."""
        if contract == "conventional" or prompt < 2:
            return 0, 0
        wide = accumulate_dtype(self._place.dtype)
        capture = self._capture(prompt, contract)
        parts = [kind.resident(self._place, capture, wide) for kind in kinds_of(self.run.arch)]
        return sum(part.state for part in parts), sum(part.adjoint for part in parts)

    def refilled(self, prompt: int, contract: str) -> int:
        """Bytes that a sweep makes again at a time, where ``prefix.snapshot_bytes`` asks for few restarts."""
        if contract == "conventional" or prompt < 2 or not self.run.config.prefix.snapshot_bytes:
            return 0
        capture, kinds = self._capture(prompt, contract), kinds_of(self.run.arch)
        return max(
            (
                sum(kind.refilled(self._place, capture, part.again) for kind in kinds)
                for part in self._group(prompt, contract).restarts().parts
            ),
            default=0,
        )

    def _capture(self, prompt: int, contract: str) -> Capture:
        group = self._group(prompt, contract)
        spans = group.spans()
        local = local_keys(self.run.core(self.run.model), self.run.new_state(1), spans)
        return Capture(tuple(spans), tuple(local), group.live_from, group.restarts().positions)

    def _group(self, prompt: int, contract: str) -> PromptGroup:
        """A group that is never captured: it knows where its chunks lie. Its ids take no room, however many."""
        if (prompt, contract) not in self._groups:
            group = PromptGroup(self.run, "plan", (0,), contract)
            group.prompt_ids = range(prompt)  # type: ignore[assignment]
            self._groups[prompt, contract] = group
        return self._groups[prompt, contract]

    @property
    def _place(self) -> Place:
        run = self.run
        dtype = run.core(run.model).config.params_dtype
        return Place(run.arch, run.runtime.layout, run.runtime.pp_rank, dtype)


@contextmanager
def open_plan(
    config: Config, runtime: PlannedRuntime, arch: Architecture, optimizer: bool = True
) -> Iterator[Plan]:
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
