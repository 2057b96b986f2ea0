"""Claim: a config file and its overrides become exactly the settings written, or one message that names
what is wrong.

Why this shows it: every rule is exercised through `load_config` on real files, valid and invalid, and each
message is searched for the dotted key, the place where it was set and a valid alternative.
It does not show: that a verb obeys a setting, or that a layout fits a world and a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lrl.config import (
    Config,
    describe_settings,
    load_config,
)
from megatron_lrl.errors import UserError


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_every_documented_key_is_read(write_config) -> None:
    config = load_config(
        write_config(
            """
            lastkv = { chunk_size = 64, blend = false, gate_init = 0.25 }
            parallel = { tp = 2, cp = 3, pp = 4, ep = 1 }
            [model]
            hf = "DIR"
            dtype = "bfloat16"
            residual_dtype = "float32"
            attention = "lastkv"
            same_bits = "auto"
            max_positions = 4096
            [prefix]
            contract = "truncated"
            chunk_size = 7
            truncate_tokens = 11
            max_staleness = 0
            measure_omitted_every = 4
            keep_graph_bytes = 0
            snapshot_bytes = 12
            [lm]
            data = "d.jsonl"
            text_key = "body"
            sequence_length = 99
            sequences_per_update = 3
            held_out = "h.txt"
            eval_every = 0
            [replay]
            concurrent = 2
            chunk_size = 7
            share_tokens = 0
            logits_chunk = 5
            check_poison = true
            use_recorded_routing = true
            [rollout]
            source = "file"
            trajectories = "t.jsonl"
            max_staleness = 2
            group_size = 3
            max_new_tokens = 9
            temperature = 0.5
            top_p = 0.9
            seed = 13
            decode_bytes = 4096
            record_routing = true
            [moe]
            router_bias_update_rate = 0.01
            aux_loss_coef = 0.001
            [loss]
            advantage = "rloo"
            objective = "cispo"
            clip_low = 0.1
            clip_high = 0.3
            kl_coef = 1
            aggregate = "sequence"
            importance_cap = 2
            [optimizer]
            lr = 1e-5
            betas = [0.8, 0.99]
            eps = 1e-9
            weight_decay = 0.1
            clip_grad = 0.5
            warmup_updates = 1
            decay = "cosine"
            min_lr = 1e-6
            [train]
            objective = "lm"
            updates = 4
            groups_per_update = 6
            save_every = 0
            max_seconds = 12
            output = "runs/a"
            overwrite = true
            seed = 17
            log_samples = 0
            window_attempts = 3
            on_nonfinite = "skip"
            [data]
            prompts = "p.jsonl"
            reward = "my.rewards:f"
            reward_args = { field = "gold" }
            reward_workers = 8
            reward_timeout = 2.5
            reward_retries = 2
            reward_errors = "zero"
            shuffle = false
            system_prompt = "Be brief."
            chat_template_args = { enable_thinking = false }
            [eval]
            prompts = "e.jsonl"
            every = 3
            samples = 16
            temperature = 0.5
            """
        )
    )
    assert config.model.model_dump() == {
        "hf": "DIR",
        "checkpoint": None,
        "dtype": "bfloat16",
        "residual_dtype": "float32",
        "same_bits": "auto",
        "max_positions": 4096,
        "attention": "lastkv",
    }
    assert config.lastkv.model_dump() == {"chunk_size": 64, "blend": False, "gate_init": 0.25}
    assert config.parallel.model_dump() == {"tp": 2, "cp": 3, "pp": 4, "ep": 1, "sequence_parallel": True}
    assert config.prefix.model_dump() == {
        "contract": "truncated",
        "chunk_size": 7,
        "truncate_tokens": 11,
        "max_staleness": 0,
        "measure_omitted_every": 4,
        "keep_graph_bytes": 0,
        "snapshot_bytes": 12,
    }
    assert config.lm.model_dump() == {
        "data": "d.jsonl",
        "text_key": "body", "sequence_length": 99, "sequences_per_update": 3,
        "held_out": "h.txt", "eval_every": 0,
    }  # fmt: skip
    assert config.replay.model_dump() == {
        "concurrent": 2,
        "chunk_size": 7,
        "share_tokens": 0,
        "logits_chunk": 5,
        "check_poison": True,
        "use_recorded_routing": True,
    }
    assert config.moe.model_dump() == {"router_bias_update_rate": 0.01, "aux_loss_coef": 0.001}
    assert config.rollout.model_dump() == {
        "source": "file",
        "trajectories": "t.jsonl",
        "max_staleness": 2,
        "group_size": 3,
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 13,
        "decode_bytes": 4096,
        "record_routing": True,
    }
    assert config.loss.model_dump() == {
        "advantage": "rloo",
        "objective": "cispo",
        "clip_low": 0.1,
        "clip_high": 0.3,
        "kl_coef": 1.0,
        "aggregate": "sequence",
        "importance_cap": 2.0,
    }
    assert config.optimizer.model_dump() == {
        "lr": 1e-5,
        "betas": (0.8, 0.99),
        "eps": 1e-9,
        "weight_decay": 0.1,
        "clip_grad": 0.5,
        "warmup_updates": 1,
        "decay": "cosine",
        "min_lr": 1e-6,
    }
    assert config.train.model_dump() == {
        "objective": "lm",
        "updates": 4,
        "groups_per_update": 6,
        "save_every": 0,
        "max_seconds": 12.0,
        "output": "runs/a",
        "overwrite": True,
        "seed": 17,
        "log_samples": 0,
        "window_attempts": 3,
        "changed_inputs": "refuse",
        "on_nonfinite": "skip",
    }
    assert config.data.model_dump() == {
        "prompts": "p.jsonl",
        "reward": "my.rewards:f",
        "reward_args": {"field": "gold"},
        "reward_workers": 8,
        "reward_timeout": 2.5,
        "reward_retries": 2,
        "reward_errors": "zero",
        "shuffle": False,
        "system_prompt": "Be brief.",
        "chat_template_args": {"enable_thinking": False},
    }
    assert config.eval.model_dump() == {"prompts": "e.jsonl", "every": 3, "samples": 16, "temperature": 0.5}


def test_defaults_are_those_of_the_design(write_config) -> None:
    config = load_config(write_config('[model]\nhf = "DIR"\n'))
    assert (config.model.dtype, config.model.attention) == ("float32", "full")
    assert config.model.same_bits == "off"
    assert (config.lastkv.chunk_size, config.lastkv.blend, config.lastkv.gate_init) == (512, True, 0.1)
    assert config.parallel.model_dump() == {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "sequence_parallel": False}
    assert config.prefix.model_dump() == {
        "contract": "exact",
        "chunk_size": 2048,
        "truncate_tokens": 8192,
        "max_staleness": 0,
        "measure_omitted_every": 0,
        "keep_graph_bytes": 0,
        "snapshot_bytes": 0,
    }
    assert (config.train.objective, config.lm.data, config.lm.sequence_length) == ("grpo", None, 2048)
    assert (config.train.window_attempts, config.train.on_nonfinite) == (2, "stop")
    assert (config.replay.concurrent, config.replay.logits_chunk) == (1, 0)
    assert config.rollout.model_dump() == {
        "source": "builtin",
        "trajectories": None,
        "max_staleness": 0,
        "group_size": 8,
        "max_new_tokens": 128,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 0,
        "decode_bytes": 2**30,
        "record_routing": False,
    }
    assert config.moe.model_dump() == {"router_bias_update_rate": 0.0, "aux_loss_coef": 0.0}
    assert (config.loss.advantage, config.loss.aggregate, config.loss.kl_coef) == ("grpo", "token", 0.0)
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.importance_cap) == (0.2, 0.2, 0.0)
    assert (config.train.updates, config.train.groups_per_update, config.train.save_every) == (20, 1, 10)
    assert not config.replay.use_recorded_routing and config.optimizer.lr == 1e-6


def test_overrides_are_toml_and_the_last_one_wins(write_config) -> None:
    path = write_config('[model]\nhf = "DIR"\n[train]\nupdates = 5\n')
    config = load_config(
        path,
        [
            "train.updates=6",
            "train.updates = 7",
            "train.output=runs/a=b",
            'data.prompts="p.jsonl"',
            "optimizer.betas=[0.5, 0.6]",
            "data.reward_args.field=gold",
            "data.reward_args.partial=0.25",
            "parallel.tp=2",
            "parallel.sequence_parallel=false",
        ],
    )
    assert config.train.updates == 7
    assert config.train.output == "runs/a=b"
    assert config.data.prompts == "p.jsonl"
    assert config.optimizer.betas == (0.5, 0.6)
    assert config.data.reward_args == {"field": "gold", "partial": 0.25}
    assert config.parallel.sequence_parallel is False


def test_an_override_of_the_model_replaces_the_other_source(write_config) -> None:
    path = write_config('[model]\nhf = "DIR"\n')
    config = load_config(path, ["model.checkpoint=CKPT"])
    assert (config.model.hf, config.model.checkpoint) == (None, "CKPT")
    assert "set exactly one" in refused(path, "model.checkpoint=a", "model.hf=b")
    assert "set exactly one" in refused(write_config('[model]\nhf = "a"\ncheckpoint = "b"\n'))
    assert "set model.hf or model.checkpoint" in refused(write_config("[train]\nupdates = 2\n"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.update=3", ["unknown key train.update", "did you mean train.updates?"]),
        ("trian.updates=3", ["unknown key trian", "did you mean train?"]),
        ("train.lr=3", ["unknown key train.lr", "did you mean optimizer.lr?"]),
        ("train.zzz=3", ["unknown key train.zzz", "valid: objective, updates, groups_per_update"]),
        ("train.updates=x", ["train.updates", "integer >= 1", "'x' (str)"]),
        ("train.updates=1.0", ["train.updates", "integer >= 1", "1.0 (float)"]),
        ("train.updates=true", ["train.updates", "integer >= 1", "True (bool)"]),
        ("train.updates=0", ["train.updates", "integer >= 1"]),
        ("train.updates.x=1", ["train.updates", "integer"]),
        ("train.overwrite=yes", ["train.overwrite", "true or false"]),
        ("train.output=3", ["train.output", "string", "3 (int)"]),
        ("train.output=", ["train.output", "non-empty string"]),
        ("rollout.group_size=1000000000000", ["rollout.group_size", "<= 65536"]),
        ("train.groups_per_update=1000000000000", ["train.groups_per_update", "<= 65536"]),
        ("optimizer.lr=true", ["optimizer.lr", "number > 0"]),
        ("optimizer.lr=nan", ["optimizer.lr", "number > 0", "nan"]),
        ("optimizer.lr=inf", ["optimizer.lr", "number > 0", "inf"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas", "two numbers"]),
        ('optimizer.betas=["a", 0.9]', ["optimizer.betas", "two numbers"]),
        ("optimizer.betas=[1.0, 0.9]", ["optimizer.betas", "below 1"]),
        ("optimizer.min_lr=1", ["optimizer.min_lr", "optimizer.lr"]),
        ("optimizer.warmup_updates=20", ["optimizer.warmup_updates = 20", "train.updates = 20"]),
        ("prefix.contract=fast", ["prefix.contract", '"response_only"', "'fast'"]),
        ("model.dtype=float16", ["model.dtype", '"bfloat16"']),
        ("loss.clip_low=1.5", ["loss.clip_low", ">= 0 and <= 1"]),
        ("rollout.temperature=0", ["rollout.temperature", "number > 0"]),
        ("rollout.top_p=0", ["rollout.top_p", "> 0 and <= 1"]),
        ("parallel.sequence_parallel=true", ["parallel.sequence_parallel", "parallel.tp > 1"]),
        ("train.minibatches=2", ["unknown key train.minibatches", "valid: objective, updates, groups_per_update"]),
        ("data.reward=exact_match", ["data.reward", '"module:function"']),
        ("data.reward_args=3", ["data.reward_args", "table"]),
        ("lastkv.gate_init=1", ["lastkv.gate_init", "> 0 and < 1"]),
    ],
)  # fmt: skip
def test_bad_overrides_name_the_key_and_what_is_valid(
    write_config, override: str, expected: list[str]
) -> None:
    message = refused(write_config('[model]\nhf = "DIR"\n'), override)
    assert all(part in message for part in [*expected, override]), message
    assert len(message.splitlines()) == 1, message


@pytest.mark.parametrize("override", ["train.updates", "updates=3", ".updates=3", "train.=3", "=3", ""])
def test_what_is_not_an_override_is_refused(write_config, override: str) -> None:
    assert "is not table.key=value" in refused(write_config('[model]\nhf = "DIR"\n'), override)


def test_an_override_cannot_smuggle_in_another_key(write_config) -> None:
    assert "train.updates" in refused(write_config('[model]\nhf = "DIR"\n'), "train.updates=3\nlr=1")


def test_problems_in_a_file_name_the_file_and_all_keys(write_config, tmp_path: Path) -> None:
    path = write_config('[model]\nhf = "DIR"\n[train]\nupdates = "3"\n[parallel]\ntp = 0\n')
    message = refused(path)
    assert len(message.splitlines()) == 2
    assert all(f"{path}: {key} expects integer >= 1" in message for key in ("train.updates", "parallel.tp"))
    assert f"{path}: train must be a table" in refused(write_config('train = 3\nmodel = { hf = "D" }\n'))
    assert "not valid TOML" in refused(write_config("[model\n")) and "line 1" in refused(
        write_config("[model\n")
    )
    assert "missing.toml: cannot be read" in refused(tmp_path / "missing.toml")
    assert "cannot be read" in refused(tmp_path)
    path.write_bytes(b"\xff\xfe")
    assert "not UTF-8 text" in refused(path)


def test_settings_are_frozen(write_config) -> None:
    config = load_config(write_config('[model]\nhf = "DIR"\n'))
    with pytest.raises(ValueError, match="frozen"):
        config.train.updates = 3


def test_help_shows_every_key_once_with_its_default() -> None:
    text = describe_settings()
    fields: dict[str, Any] = Config.model_fields
    for table, field in fields.items():
        section = text.split(f"[{table}]", 1)[1].split("\n\n", 1)[0]
        for key, setting in field.annotation.model_fields.items():
            assert setting.description and setting.description in section
            assert sum(line.split()[:1] == [key] for line in section.splitlines()) == 1, key
    assert '(one of "grpo", "dr_grpo", "rloo"; default: "grpo")' in text
    assert "(number > 0 and <= 1000.0; default: 1e-06)" in text
    assert "(true or false; default: true if tp > 1)" in text
