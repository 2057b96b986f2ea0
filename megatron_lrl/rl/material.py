"""What verbs read before a model is built: prompts, groups, documents, the reward; checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron_lrl.checkpoint.publish import carried_files
from megatron_lrl.config import check_train
from megatron_lrl.errors import UserError
from megatron_lrl.experts.record import RoutingShape
from megatron_lrl.layers.moe.routing import expert_layers
from megatron_lrl.lifetimes.open import read_model_architecture
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.plan.graphs import Work
from megatron_lrl.rl.accumulate import WindowPlan, require_routing
from megatron_lrl.rl.lm_data import Corpus, load_corpus
from megatron_lrl.rl.rewards import Reward, load_reward
from megatron_lrl.rl.source import Trajectories
from megatron_lrl.rollout.data import Limits, read_prompts, read_trajectories
from megatron_lrl.rollout.text import Text, hf_folder
from megatron_lrl.rollout.types import Group, Prompt
from megatron_lrl.settings import Config


def limits(arch: Architecture) -> Limits:
    """What token ids and lengths this model takes."""
    shape = None
    if arch.moe is not None:
        shape = RoutingShape(expert_layers(arch), arch.moe.num_experts, arch.moe.top_k)
    return Limits(arch.vocab_size, arch.positions, shape)


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


class Documents(NamedTuple):
    """What next-token training reads."""

    corpus: Corpus
    held_out: Corpus | None


class Groups(NamedTuple):
    """What GRPO reads."""

    prompts: list[Prompt]
    recorded: Trajectories | None  # where responses are not sampled
    work: Work  # the longest prompt, the largest group of the longest responses
    held_out: list[Prompt]
    reward: Reward
    text: Text


def read_material(config: Config) -> Documents | Groups:
    """What a run trains on and what it holds out, read and checked against the model."""
    check_train(config)
    arch = read_model_architecture(config)
    carried_files(hf_folder(config))  # what its checkpoints will carry, seen before the first update
    text = Text(hf_folder(config))
    if config.train.objective == "lm":
        read = partial(load_corpus, config.lm, text.tokenizer, arch.vocab_size, arch.positions)
        held_out = None
        if config.lm.held_out is not None:
            held_out = read(config.train.seed, shuffle=False, key="held_out")
        return Documents(read(config.train.seed, config.data.shuffle), held_out)
    held_out_prompts, recorded = [], None
    largest, longest = config.rollout.group_size, config.rollout.max_new_tokens
    if config.rollout.source == "file":
        assert config.rollout.trajectories is not None
        groups = recorded_groups(config, config.rollout.trajectories)
        recorded = Trajectories(config, groups)
        for group in groups:
            WindowPlan([group], config)  # rewards or advantages are there
        largest = max(len(group.responses) for group in groups)
        longest = max(len(response.ids) for group in groups for response in group.responses)
        prompts = [Prompt(group.id, group.prompt_ids) for group in groups]
    else:
        assert config.data.prompts is not None
        prompts = load_prompts(config, arch, text, config.data.prompts)
    if config.eval.prompts is not None:
        held_out_prompts = load_prompts(config, arch, text, config.eval.prompts)
    reward = load_reward(config.data.reward, config.data.reward_args)
    if unrewarded := unrewarded_prompts(reward, [*([] if recorded else prompts), *held_out_prompts]):
        raise next(iter(unrewarded.values()))
    work = Work(max(len(prompt.prompt_ids) for prompt in prompts), longest, largest, config.replay.concurrent)
    return Groups(prompts, recorded, work, held_out_prompts, reward, text)


def recorded_groups(config: Config, trajectories: str) -> list[Group]:
    """The groups of a trajectory file, checked against the model."""
    groups = list(read_trajectories(trajectories, limits(read_model_architecture(config))))
    require_routing(groups, config)
    return groups


def unrewarded_prompts(reward: Reward, prompts: Sequence[Prompt]) -> dict[str, UserError]:
    """Prompts, by id, that a reward of this package refuses, and why. A user's own function is not tried."""
    errors: dict[str, UserError] = {}
    if reward.name.startswith("megatron_lrl."):
        for prompt in prompts:
            try:
                reward("", prompt)
            except UserError as error:
                errors[prompt.id] = error
    return errors
