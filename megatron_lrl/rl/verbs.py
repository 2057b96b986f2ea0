"""What train, generate, score and grad do, once a run is open.

`import` and `export` live in `checkpoint`, `check` in `checks`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from megatron_lrl.checkpoint.hf_export import write_hf_file
from megatron_lrl.checkpoint.publish import carried_files
from megatron_lrl.checkpoint.training import (
    latest_training,
    load_training,
    read_progress,
    save_training,
    training_path,
)
from megatron_lrl.config import check_train, differing_settings
from megatron_lrl.errors import UserError
from megatron_lrl.experts.record import RoutingShape
from megatron_lrl.layers.moe.routing import expert_layers
from megatron_lrl.lifetimes.open import open_run, read_model_architecture
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.outputs import GRADIENT, held
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.plan.report import against_measured, plan_of_run, saving_against_measured
from megatron_lrl.rl.accumulate import (
    WindowPlan,
    accumulate,
    branches_of,
    require_routing,
    routing_mismatch,
    score_group,
)
from megatron_lrl.rl.evaluate import Evaluation
from megatron_lrl.rl.finite import reduce_finite, require_finite
from megatron_lrl.rl.inputs import check_inputs, fingerprints
from megatron_lrl.rl.interrupt import interruptible
from megatron_lrl.rl.lm import LmTrainer
from megatron_lrl.rl.lm_data import Corpus, load_corpus
from megatron_lrl.rl.output import check_output, claim_output
from megatron_lrl.rl.retry import Retry
from megatron_lrl.rl.rewards import Reward, load_reward
from megatron_lrl.rl.source import Sampling, Source, Trajectories
from megatron_lrl.rl.trainer import Trainer
from megatron_lrl.rollout.data import Limits, read_prompts, read_trajectories, write_jsonl, write_trajectories
from megatron_lrl.rollout.journal import Journal
from megatron_lrl.rollout.text import Text, hf_folder
from megatron_lrl.rollout.types import Group, Prompt
from megatron_lrl.runtime import Runtime
from megatron_lrl.settings import Config
from megatron_lrl.tracking import Tracker


def limits(arch: Architecture) -> Limits:
    """What token ids and lengths this model takes."""
    shape = None
    if arch.moe is not None:
        shape = RoutingShape(expert_layers(arch), arch.moe.num_experts, arch.moe.top_k)
    return Limits(arch.vocab_size, arch.max_positions, shape)


def load_prompts(config: Config, arch: Architecture, text: Text, path: str | Path) -> list[Prompt]:
    """All prompts of a file, checked against the model. Raises `UserError` naming file and line."""
    return list(
        read_prompts(
            path,
            limits(arch),
            tokenizer=text.tokenizer,
            max_new_tokens=config.rollout.max_new_tokens,
            system_prompt=config.data.system_prompt,
            chat_template_args=config.data.chat_template_args,
        )
    )


class _Documents(NamedTuple):
    """What next-token training reads."""

    corpus: Corpus
    held_out: Corpus | None


class _Groups(NamedTuple):
    """What GRPO reads."""

    prompts: list[Prompt]
    recorded: Trajectories | None  # where responses are not sampled
    held_out: list[Prompt]
    reward: Reward
    text: Text


def _material(
    config: Config,
) -> _Documents | _Groups:
    """What a run trains on and what it holds out, read and checked against the model."""
    check_train(config)
    arch = read_model_architecture(config)
    carried_files(hf_folder(config))  # what its checkpoints will carry, seen before the first update
    text = Text(hf_folder(config))
    if config.train.objective == "lm":
        read = partial(load_corpus, config.lm, text.tokenizer, arch.vocab_size, arch.max_positions)
        held_out = None
        if config.lm.held_out is not None:
            held_out = read(config.train.seed, shuffle=False, key="held_out")
        return _Documents(read(config.train.seed, config.data.shuffle), held_out)
    held_out_prompts, recorded = [], None
    if config.rollout.source == "file":
        assert config.rollout.trajectories is not None
        groups = _recorded(config, config.rollout.trajectories)
        recorded = Trajectories(config, groups)
        _ = [WindowPlan([group], config, 1, 0) for group in groups]  # rewards or advantages are there
        prompts = [Prompt(group.id, group.prompt_ids) for group in groups]
    else:
        assert config.data.prompts is not None
        prompts = load_prompts(config, arch, text, config.data.prompts)
    if config.eval.prompts is not None:
        held_out_prompts = load_prompts(config, arch, text, config.eval.prompts)
    reward = load_reward(config.data.reward, config.data.reward_args)
    if unrewarded := _unrewarded(reward, [*([] if recorded else prompts), *held_out_prompts]):
        raise next(iter(unrewarded.values()))
    return _Groups(prompts, recorded, held_out_prompts, reward, text)


def train(config: Config, runtime: Runtime) -> None:
    """Run the configured updates, resuming from the newest checkpoint of the output folder and its journal."""
    material = runtime.together(_material, config)
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


def _train(config: Config, runtime: Runtime, material: _Documents | _Groups, output: Path) -> None:
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
        if isinstance(material, _Documents):
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
            if runtime.is_main and prompts:
                try:
                    planned = plan_of_run(run, max(len(prompt.prompt_ids) for prompt in prompts))
                except Exception as error:  # advice: a module that has no meta form must not end the run
                    tracker.note(f"bytes were not planned: {type(error).__name__}: {error}")
            saved = first if newest is not None else None
            start = evaluation.before(first) if evaluation is not None else {}
            for number in range(first, config.train.updates):
                metrics, samples = trainer.update(number)
                if evaluation is not None:
                    metrics |= (start if number == first else {}) | evaluation.after(number + 1)
                if planned is not None:
                    metrics |= {f"bytes_planned/{name}": float(n) for name, n in planned.lifetimes().items()}
                    if number == first:
                        tracker.note(f"after update {number + 1}\n{against_measured(planned, run.ledger)}")
                runtime.together(tracker.log, number, metrics, samples)
                done = number + 1
                # One rank's signal stops all, at the same update.
                stop = any(runtime.gather_objects(interrupt.asked))
                every = config.train.save_every
                if stop or done == config.train.updates or (every and done % every == 0):
                    taken = save_training(run, training_path(output, done), _progress(config, done, inputs))
                    run.ledger.output = max(run.ledger.output, taken)
                    if (
                        runtime.is_main
                    ):  # the checkpoint before this one stays too, should this one get damaged
                        journal.trim(saved or 0)
                    saved = done
                if stop:
                    tracker.note(f"interrupted after update {done}; the same command resumes")
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


def generate(config: Config, runtime: Runtime, prompts_path: str, out: str) -> None:
    """Sample a group for every prompt of a file and write trajectories, with rewards if the prompts have answers."""

    def prepare() -> tuple[Text, list[Prompt], Reward | None]:
        arch, text = read_model_architecture(config), Text(hf_folder(config))
        prompts = load_prompts(config, arch, text, prompts_path)
        reward = load_reward(config.data.reward, config.data.reward_args)
        unrewarded = _unrewarded(reward, prompts)
        if len(unrewarded) == len(prompts):  # prompts without answers can be sampled, not rewarded
            return text, prompts, None
        if unrewarded:
            raise next(iter(unrewarded.values()))
        return text, prompts, reward

    text, prompts, reward = runtime.together(prepare)
    if runtime.is_main:
        print(text.describe(prompts), flush=True)
    with open_run(config, runtime) as run:
        source = Sampling(run, prompts, reward, text)
        mine = list(enumerate(prompts))[runtime.dp_rank :: runtime.dp]
        with in_lockstep(run), UpdateWindow(run) as window, _bar(runtime, "generate", len(mine)) as bar:

            def capture(prefix: PromptGroup) -> None:
                prefix.capture()
                bar.update()

            prefixes = [
                window.prompt_group(prompt.id, prompt.prompt_ids, "response_only", quiet=False)
                for _, prompt in mine
            ]
            rollouts = source.sampler.sample_together(
                prefixes, config.rollout.group_size, config.rollout.max_new_tokens, 0, capture
            )
        sampled = [(place, rollout) for (place, _), rollout in zip(mine, rollouts, strict=True)]

        def rewarded() -> list[tuple[int, Group]]:
            if not runtime.is_replica_leader:
                return []
            places = [place for place, _ in sampled]
            groups = source.rewarded([(prompts[place], rollout) for place, rollout in sampled])
            return list(zip(places, groups, strict=True))

        groups = runtime.in_order(runtime.together(rewarded))
    for group in groups:  # the same on every rank
        require_finite(config, group.id, [response.logprobs or () for response in group.responses])
    runtime.together(lambda: write_trajectories(out, groups) if runtime.is_main else None)
    _say_written(runtime, out, groups, sum(len(group.responses) for group in groups))


def score(config: Config, runtime: Runtime, trajectories: str, out: str) -> None:
    """Write the log-probabilities of recorded responses under the model."""
    groups = runtime.together(_recorded, config, trajectories)
    mine: list[tuple[int, dict[str, Any]]] = []
    with open_run(config, runtime) as run, in_lockstep(run):
        for place, group in _shared(list(enumerate(groups)), runtime, "score"):
            branches = branches_of(group)
            with (
                UpdateWindow(run) as window,
                window.prompt_group(group.id, group.prompt_ids, quiet=False) as prefix,
            ):
                logprobs = score_group(prefix, branches)
            scored = [_scored(logprobs[branch.key], branch.mask) for branch in branches]
            mine.append((place, {"id": group.id, "logprobs": scored}))
    records = runtime.in_order(mine)
    for record in records:  # the same on every rank
        require_finite(config, record["id"], record["logprobs"])
    runtime.together(lambda: write_jsonl(out, records) if runtime.is_main else None)
    _say_written(runtime, out, records, sum(len(record["logprobs"]) for record in records))


def _scored(logprob_R: torch.Tensor, mask: Sequence[int] | None) -> list[float | None]:
    """Log-probabilities of a response as `score` writes them: null for a token that the policy did not choose."""
    values: list[float | None] = logprob_R.tolist()
    return (
        values if mask is None else [value if one else None for value, one in zip(values, mask, strict=True)]
    )


def grad(config: Config, runtime: Runtime, trajectories: str, out: str) -> None:
    """Write the gradient of one window of recorded groups, under Hugging Face names and shapes.

    float32, or float64 for a float64 model; the metadata say which contract it follows.
    """
    groups = runtime.together(_recorded, config, trajectories)
    plan = runtime.together(WindowPlan, groups, config, runtime.dp, runtime.dp_rank)
    with open_run(config, runtime, gradients=True) as run, UpdateWindow(run) as window:
        # The reference is the model as loaded: the policy itself.
        reference = run.core(run.model) if config.loss.kl_coef > 0 else None
        sums = accumulate(window, plan, reference=reference, quiet=False)
        reduce_finite(window)
        told: dict[str, Any] = {"contract": config.prefix.contract}
        if config.prefix.contract == "truncated":  # no other contract reads it
            told["truncate_tokens"] = config.prefix.truncate_tokens
        told |= {
            "loss": float(sums["loss_sum"]),
            "tokens": plan.totals.tokens,
            "responses": plan.totals.responses,
            **routing_mismatch(sums),
        }
        # safetensors holds strings alone
        metadata = {"format": "pt", **GRADIENT, **{name: str(value) for name, value in told.items()}}
        wide = run.precision.accumulation
        run.ledger.output = write_hf_file(run.model, run.arch, out, runtime, dtype=wide, metadata=metadata)
        if runtime.is_main:
            nbytes = {"run": run.ledger.run, **run.ledger.peak, "output": run.ledger.output}
            print(json.dumps({**told, "bytes": nbytes, "out": str(out)}), flush=True)


def _recorded(config: Config, trajectories: str) -> list[Group]:
    """The groups of a trajectory file, checked against the model."""
    groups = list(read_trajectories(trajectories, limits(read_model_architecture(config))))
    require_routing(groups, config)
    return groups


def _unrewarded(reward: Reward, prompts: Sequence[Prompt]) -> dict[str, UserError]:
    """Prompts, by id, that a reward of this package refuses, and why. A user's own function is not tried."""
    errors: dict[str, UserError] = {}
    if reward.name.startswith("megatron_lrl."):
        for prompt in prompts:
            try:
                reward("", prompt)
            except UserError as error:
                errors[prompt.id] = error
    return errors


def _say_written(runtime: Runtime, out: str, groups: Sequence[Any], responses: int) -> None:
    if runtime.is_main:
        print(f"wrote {out}: {len(groups)} groups, {responses} responses", flush=True)


def _shared(items: Sequence[Any], runtime: Runtime, what: str) -> Iterator[Any]:
    """This replica's share of some items, with a progress bar on rank 0."""
    share = items[runtime.dp_rank :: runtime.dp]
    with _bar(runtime, what, len(share)) as bar:
        for item in share:
            yield item
            bar.update()


def _bar(runtime: Runtime, what: str, groups: int) -> tqdm:
    return tqdm(total=groups, desc=what, unit="group", delay=2, disable=not runtime.is_main or groups < 2)
