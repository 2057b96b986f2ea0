"""`train`: a run's updates, checkpoints and log, from the newest checkpoint on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from megatron_lrl.checkpoint.training import (
    latest_training,
    load_training,
    read_progress,
    save_training,
    training_path,
)
from megatron_lrl.config import differing_settings
from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.outputs import held
from megatron_lrl.plan.report import against_measured, plan_of_run, saving_against_measured
from megatron_lrl.rl.evaluate import Evaluation
from megatron_lrl.rl.inputs import check_inputs, fingerprints
from megatron_lrl.rl.interrupt import interruptible
from megatron_lrl.rl.lm import LmTrainer
from megatron_lrl.rl.material import Documents, Groups, read_material
from megatron_lrl.rl.output import check_output, claim_output
from megatron_lrl.rl.retry import Retry
from megatron_lrl.rl.source import Sampling, Source
from megatron_lrl.rl.stopwatch import WallTime
from megatron_lrl.rl.trainer import Trainer
from megatron_lrl.rollout.journal import Journal
from megatron_lrl.rollout.types import Prompt
from megatron_lrl.runtime import Runtime
from megatron_lrl.settings import Config
from megatron_lrl.tracking import Tracker


def train(config: Config, runtime: Runtime) -> None:
    """Run the configured updates, resuming from the newest checkpoint of the output folder and its journal."""
    material = runtime.together(read_material, config)
    assert config.train.output is not None
    output = Path(config.train.output).absolute()
    runtime.together(check_output, output, config, runtime.is_main)
    with _held(output, config, runtime):
        _train(config, runtime, material, output)


@contextmanager
def _held(output: Path, config: Config, runtime: Runtime) -> Iterator[None]:
    """`outputs.held` by rank 0, refused on all ranks alike; what another run left meanwhile is looked at again."""
    with ExitStack() as stack:
        lock = held(output, f"train.output = {output}", runtime.is_main)
        runtime.together(stack.enter_context, lock)
        runtime.together(check_output, output, config, runtime.is_main)
        yield


def _train(config: Config, runtime: Runtime, material: Documents | Groups, output: Path) -> None:
    newest = None if config.train.overwrite else latest_training(output, runtime)
    inputs = runtime.gather_objects(
        runtime.together(lambda: fingerprints(config) if runtime.is_main else {})
    )[0]
    changed: list[str] = []
    if newest is not None:
        progress = runtime.together(read_progress, newest)
        runtime.together(_check_progress, progress, config, newest)
        changed = runtime.together(check_inputs, progress.get("inputs"), inputs, config, newest)
    with open_run(config, runtime, optimizer=True) as run, interruptible(runtime.is_main) as interrupt:
        first = 0
        if newest is not None:
            progress = load_training(run, newest, checked=True)
            first = int(progress["update"])
        runtime.together(claim_output, output, config, runtime.is_main)
        journal = Journal(output, config, inputs)
        retry = Retry(run, config.train.window_attempts)
        trainer: Trainer | LmTrainer
        prompts: list[Prompt] = []
        evaluation: Evaluation | None = None
        if isinstance(material, Documents):
            trainer = LmTrainer(run, material.corpus, retry, material.held_out)
        else:
            prompts, reward, text = material.prompts, material.reward, material.text
            source: Source = material.recorded or Sampling(run, prompts, reward, text, journal)
            trainer = Trainer(run, source, text, retry)
            evaluation = Evaluation(run, material.held_out, reward, text)
        show = runtime.together(
            Tracker, output, runtime.is_main, first_update=first, updates=config.train.updates
        )
        with show as tracker, closing(trainer):
            if prompts:
                tracker.note(text.describe(prompts))
            if newest is not None:
                tracker.note(f"resumed {newest} at update {first}")
            if changed:
                tracker.note(f"goes on with other content of {', '.join(changed)}")
            planned = None
            if runtime.is_main and isinstance(material, Groups):
                try:
                    planned = plan_of_run(run, material.work, recorded=material.recorded is not None)
                except Exception as error:  # advice: a module that has no meta form must not end the run
                    tracker.note(f"bytes were not planned: {type(error).__name__}: {error}")
            saved = first if newest is not None else None
            start = evaluation.before(first) if evaluation is not None else {}
            time = WallTime(config.train.max_seconds)
            for number in range(first, config.train.updates):
                with time.update():
                    metrics, samples = trainer.update(number)
                    if evaluation is not None:
                        metrics |= (start if number == first else {}) | evaluation.after(number + 1)
                    if planned is not None:
                        metrics |= {f"bytes_planned/{n}": float(x) for n, x in planned.lifetimes().items()}
                        if number == first:
                            tracker.note(
                                f"after update {number + 1}\n{against_measured(planned, run.ledger)}"
                            )
                    runtime.together(tracker.log, number, metrics, samples)
                done = number + 1
                # One rank's signal, or clock, stops all, at the same update.
                asked, spent = map(
                    any, zip(*runtime.gather_objects((interrupt.asked, time.spent)), strict=True)
                )
                stop = asked or spent
                every = config.train.save_every
                if stop or done == config.train.updates or (every and done % every == 0):
                    with time.saving():
                        taken = save_training(
                            run, training_path(output, done), _progress(config, done, inputs)
                        )
                    run.ledger.output = max(run.ledger.output, taken)
                    if (
                        runtime.is_main
                    ):  # the checkpoint before this one stays too, should this one get damaged
                        journal.trim(saved or 0)
                    saved = done
                if stop:
                    why = (
                        "interrupted"
                        if asked
                        else f"train.max_seconds = {config.train.max_seconds:g}: stopped"
                    )
                    tracker.note(f"{why} after update {done}; the same command resumes")
                    break
            if saved is not None:
                tracker.note(f"checkpoint {training_path(output, saved)}")
            if planned is not None and run.ledger.output:
                tracker.note(saving_against_measured(planned, run.ledger))


def _progress(config: Config, done: int, inputs: dict[str, str]) -> dict[str, Any]:
    return {"update": done, "config": config.model_dump(mode="json"), "inputs": inputs}


def _check_progress(progress: dict[str, Any], config: Config, path: Path) -> None:
    differing = differing_settings(progress["config"], config)
    if differing:
        raise UserError(
            f"{path} belongs to a run with other settings ({', '.join(differing)}); choose another train.output, "
            "or set train.overwrite = true to start anew"
        )
    if int(progress["update"]) > config.train.updates:
        raise UserError(
            f"{path} is at update {progress['update']}, past train.updates = {config.train.updates}"
        )
