"""Rank functions of the transaction tests: updates of a tiny model in which one rank fails once, at a given event."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import World

from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.identity import IdentityMismatch
from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.stale import LeasedGroup, StalePrefixCache
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.rl import accumulate
from megatron_lrl.rl.retry import Retry
from megatron_lrl.rl.rewards import load_reward
from megatron_lrl.rl.source import Sampling
from megatron_lrl.rl.trainer import Trainer
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Prompt
from megatron_lrl.runtime import Layout, Runtime, runtime_scope
from megatron_lrl.settings import Config

UPDATES = 2
KINDS = ("forward", "backward", "collective")
ERRORS: dict[str, Callable[[], Exception]] = {
    "exception": lambda: ArithmeticError("injected"),
    "device memory": lambda: torch.OutOfMemoryError("injected"),
    "host memory": lambda: MemoryError("injected"),
    "mistake": lambda: UserError("found by one rank alone"),
}
COLLECTIVES = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast",
    "batch_isend_irecv", "all_gather_object",
)  # fmt: skip
_UNEQUAL = (
    "seconds/",
    "speed/",
    "bytes/",
    "window/",
    "pipeline/",
)  # metrics that count every attempt, or time


class Fault:
    """Counts layers' forwards, their backwards and collectives on this rank; raises at one, once or ever after."""

    def __init__(self, kind: str = "", at: int = -1, error: str = "exception", forever: bool = False) -> None:
        self.kind, self.at, self.error, self.forever = kind, at, error, forever
        self.counts = dict.fromkeys(KINDS, 0)
        self.counting, self.fired = True, False

    def event(self, kind: str) -> None:
        if not self.counting:
            return
        self.counts[kind] += 1
        if kind == self.kind and self.counts[kind] >= self.at and (self.forever or not self.fired):
            self.fired = True
            raise ERRORS[self.error]()

    def watch(self, layer: torch.nn.Module) -> None:
        def forward(_layer: Any, _inputs: Any, output: Any) -> None:
            self.event("forward")
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _: self.event("backward"))

        layer.register_forward_hook(forward)

    @contextmanager
    def watching(self, run: Run) -> Iterator[Fault]:
        """Faults at this run's layers and at torch.distributed's functions, but not in the optimizer step."""
        for layer in run.core(run.model).decoder.layers:
            self.watch(layer)
        plain = {name: getattr(dist, name) for name in COLLECTIVES}
        step = UpdateWindow.step

        def counted(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.event("collective")
                return plain[name](*args, **kwargs)

            return call

        def uncounted_step(window: UpdateWindow) -> Any:
            self.counting = False
            try:
                return step(window)
            finally:
                self.counting = True

        UpdateWindow.step = uncounted_step  # type: ignore[method-assign]
        for name in COLLECTIVES:
            setattr(dist, name, counted(name))
        try:
            yield self
        finally:
            UpdateWindow.step = step  # type: ignore[method-assign]
            for name, function in plain.items():
                setattr(dist, name, function)


def config_of(world: World, hf: str, settings: Sequence[str]) -> Config:
    return load_config("/dev/null", [f"model.hf={hf}", *world.overrides, *settings])


def digest(run: Run) -> str:
    """Over parameters, master weights, moments and step counts of this rank, to the bit."""
    found = hashlib.sha256()
    tensors = [p.detach() for p in run.core(run.model).parameters()]
    for part in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        for group in part.optimizer.param_groups:
            found.update(repr((group["lr"], group["weight_decay"], group.get("step"))).encode())
            for main in group["params"]:
                state = part.optimizer.state[main]
                tensors += [
                    main.detach(),
                    *(state[key] for key in sorted(state) if torch.is_tensor(state[key])),
                ]
    for tensor in tensors:
        # Bytes, not numbers: NumPy has no bfloat16.
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@contextmanager
def trainer_of(runtime: Runtime, config: Config, prompts: Sequence[Prompt]) -> Iterator[Trainer]:
    """A trainer with two attempts a window."""
    reward = load_reward("cli.toy_rewards:low_ids", {})
    with open_run(config, runtime, optimizer=True) as run:
        text = Text(Path(config.model.hf or ""))
        yield Trainer(run, Sampling(run, prompts, reward, text), text, Retry(run, 2))


@contextmanager
def opened(world: World, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[Runtime, list[Prompt]]]:
    with runtime_scope(Layout(world.tp, world.cp, world.pp)) as runtime:
        yield (
            runtime,
            [Prompt(f"p{i}", tuple(ids), {}) for i, ids in enumerate(prompts)],
        )


def updates(runtime: Runtime, config: Config, prompts: Sequence[Prompt], fault: Fault) -> dict[str, Any]:
    """`UPDATES` updates under a fault: final digest, metrics, restarts, and what this rank counted."""
    with trainer_of(runtime, config, prompts) as trainer:
        metrics, restarts = [], 0.0
        with fault.watching(trainer.run):
            for number in range(UPDATES):
                found, _ = trainer.update(number)
                restarts += found["window/restarts"]
                metrics.append({k: v for k, v in found.items() if not k.startswith(_UNEQUAL)})
        return {
            "digest": digest(trainer.run),
            "metrics": metrics,
            "restarts": restarts,
            "version": trainer.run.version,
            "counts": fault.counts,
            "fired": fault.fired,
        }


def trials(
    world: World, hf: str, settings: Sequence[str], prompts: Sequence[Sequence[int]], draws: Sequence[Any]
) -> list[dict[str, Any]]:
    """An undisturbed run, then one for each draw (rank, kind, place in [0, 1), error), in one world."""
    config = config_of(world, hf, settings)
    with opened(world, prompts) as (runtime, given):
        gc.collect()
        gc.freeze()  # every restart collects garbage: not among the libraries' objects again and again
        found = [updates(runtime, config, given, Fault())]
        for rank, kind, place, error in draws:
            fault = Fault()
            if runtime.rank == rank:
                at = 1 + int(place * found[0]["counts"][kind])
                fault = Fault(kind, at, error)
                print(
                    f"rank {rank} fails with {error} at {kind} {at} of {found[0]['counts'][kind]}", flush=True
                )
            found.append(updates(runtime, config, given, fault))
    return found


def hopeless(world: World, hf: str, settings: Sequence[str], prompts: Sequence[Sequence[int]]) -> list[str]:
    """What ends the run when every attempt fails, and when a mistake of the user is found in the middle of a pass."""
    config, messages = config_of(world, hf, settings), []
    with opened(world, prompts) as (runtime, given):
        for fault in (Fault("forward", 40, forever=True), Fault("forward", 40, "mistake")):
            try:
                updates(runtime, config, given, fault)
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
    return messages


class _InfiniteGradient(torch.autograd.Function):
    """Identity whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        return dx * float("inf")


def nonfinite(
    world: World, hf: str, settings: Sequence[str], prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """A branch whose loss, or gradient, is not finite in the first update, under both values of train.on_nonfinite."""
    plain, found = accumulate.token_loss, {}
    with opened(world, prompts) as (runtime, given):
        for kind in ("loss", "gradient"):
            answer = found[kind] = {"skipped": [], "message": ""}
            for mode in ("stop", "skip"):
                config = config_of(world, hf, [*settings, f"train.on_nonfinite={mode}"])
                with trainer_of(runtime, config, given) as trainer:
                    bad = f"{trainer.source.named_prompts(0)[0].id}[1]"
                    answer["names"] = bad

                    def poisoned(batch: Any, *args: Any, bad: str = bad, kind: str = kind) -> Any:
                        loss = plain(batch, *args)
                        if bad not in [str(branch.key) for branch in batch]:
                            return loss

                        def call(logprob_S: torch.Tensor, *rest: torch.Tensor) -> Any:
                            logprob_S = (
                                _InfiniteGradient.apply(logprob_S) if kind == "gradient" else logprob_S
                            )
                            total, metrics = loss(logprob_S, *rest)
                            return (total if kind == "gradient" else total * float("nan")), metrics

                        return call

                    accumulate.token_loss = poisoned
                    before = digest(trainer.run)
                    try:
                        metrics, _ = trainer.update(0)
                        answer["skipped"].append(metrics["update/skipped"])
                    except UserError as error:
                        answer["message"] = str(error)
                    finally:
                        accumulate.token_loss = plain
                    answer[f"unchanged_by_{mode}"] = (
                        digest(trainer.run) == before and trainer.run.version == 1
                    )
                    if mode == "skip":
                        answer["skipped"].append(trainer.update(1)[0]["update/skipped"])
                        answer["version"] = trainer.run.version
                        answer["moved"] = digest(trainer.run) != before
    return found


def stale(world: World, hf: str, settings: Sequence[str], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Four updates of one prompt whose prefix may be two steps old; what is refused; a failure in between."""
    found: dict[str, Any] = {"ages": [], "drifts": [], "drifts_max": [], "captures": []}
    reuse = [
        *settings,
        "prefix.contract=response_only",
        "prefix.max_staleness=2",
        "train.groups_per_update=1",
    ]
    config, leases, captures = config_of(world, hf, reuse), [], [0]
    lease, capture = StalePrefixCache.lease, PromptGroup.capture

    def recorded_lease(*args: Any, **kwargs: Any) -> LeasedGroup:
        leases.append(lease(*args, **kwargs))
        return leases[-1]

    def counted_capture(group: PromptGroup) -> None:
        captures[0] += 1
        capture(group)

    with opened(world, prompts[:1]) as (runtime, given):
        with trainer_of(runtime, config, given) as trainer:
            StalePrefixCache.lease, PromptGroup.capture = recorded_lease, counted_capture  # type: ignore[method-assign]
            try:
                for number in range(4):
                    captures[0] = 0
                    metrics, _ = trainer.update(number)
                    found["ages"].append(metrics.get("staleness/age"))
                    found["captures"].append(captures[0])
                    if "staleness/drift" in metrics:
                        found["drifts"].append(metrics["staleness/drift"])
                        found["drifts_max"].append(metrics["staleness/drift_max"])
            finally:
                StalePrefixCache.lease, PromptGroup.capture = lease, capture  # type: ignore[method-assign]
            identity = leases[1].identity.to_dict()
            found["identity"] = {key: identity[key] for key in ("model_version", "max_staleness")}
        with trainer_of(runtime, config, given) as trainer:
            run, ids = trainer.run, given[0].prompt_ids
            with UpdateWindow(run) as window, window.prompt_group("p", ids) as owner:
                leased = LeasedGroup(run, "p", ids, owner, 2)
                for version in (1, 2, 3):
                    run.version = version
                    leased.check_identity()
                run.version = 4
                try:
                    leased.fork(1)
                except IdentityMismatch as error:
                    found["refused"] = str(error)
        try:
            config_of(world, hf, [*settings, "prefix.contract=exact", "prefix.max_staleness=2"])
        except UserError as error:
            found["contract"] = str(error)
    return found


def stale_restart(world: World, hf: str, settings: Sequence[str], prompts: Sequence[Sequence[int]]) -> bool:
    """Whether a failure evicts what was captured for the window, so that the update ends as an undisturbed one."""
    reuse = ["prefix.contract=response_only", "prefix.max_staleness=2", "train.groups_per_update=1"]
    config = config_of(world, hf, [*settings, *reuse])
    with opened(world, prompts[:1]) as (runtime, given):
        undisturbed = updates(runtime, config, given, Fault())
        disturbed = updates(runtime, config, given, Fault("forward", 12))
        return disturbed["restarts"] == 1 and disturbed["digest"] == undisturbed["digest"]
