"""Claim: `train` needs settings that can teach anything; a run that resumes may change its layout, not its objective.

Why this shows it: each rule is exercised through `load_config` on a real file, by what is missing and by what differs.
It does not show: that a verb obeys a setting.
"""

from __future__ import annotations

import json

import pytest

from megatron_lrl.config import check_train, differing_settings, load_config
from megatron_lrl.errors import UserError


def test_training_needs_prompts_an_output_and_a_group(write_config) -> None:
    path = write_config('[model]\nhf = "DIR"\n[train]\noutput = "runs/a"\n[data]\nprompts = "p.jsonl"\n')
    check_train(load_config(path))
    with pytest.raises(UserError, match=r"rollout\.group_size = 1.*at least 2"):
        check_train(load_config(path, ["rollout.group_size=1"]))
    with pytest.raises(UserError, match=r"needs rollout\.record_routing = true"):
        check_train(load_config(path, ["replay.use_recorded_routing=true"]))
    bare = write_config('[model]\nhf = "DIR"\n')
    with pytest.raises(UserError, match=r"data\.prompts"):
        check_train(load_config(bare, ["train.output=a"]))
    with pytest.raises(UserError, match=r"train\.output"):
        check_train(load_config(bare, ["data.prompts=a"]))


def test_recorded_groups_need_their_file_and_no_prompts(write_config) -> None:
    path = write_config('[model]\nhf = "DIR"\n[rollout]\nsource = "file"\n[train]\noutput = "runs/a"\n')
    with pytest.raises(UserError, match=r"needs rollout\.trajectories"):
        check_train(load_config(path))
    given = ["rollout.trajectories=t.jsonl", "rollout.group_size=1"]
    check_train(load_config(path, given))
    with pytest.raises(UserError, match=r"prefix\.max_staleness"):
        check_train(load_config(path, [*given, "prefix.max_staleness=1"]))


def test_a_resumed_run_may_change_its_layout_but_not_its_objective(write_config) -> None:
    path = write_config('[model]\nhf = "DIR"\n')
    saved = json.loads(json.dumps(load_config(path).model_dump(mode="json")))
    harmless = ["parallel.tp=2", "prefix.chunk_size=64", "replay.concurrent=4", "train.updates=30",
                "train.output=elsewhere", "train.overwrite=true", "train.save_every=1"]  # fmt: skip
    assert differing_settings(saved, load_config(path)) == []
    assert differing_settings(saved, load_config(path, harmless)) == []
    changed = [
        "loss.kl_coef=0.1",
        "model.hf=OTHER",
        "optimizer.betas=[0.1, 0.2]",
        "prefix.contract=truncated",
        "replay.use_recorded_routing=true",
    ]
    assert differing_settings(saved, load_config(path, changed)) == [
        "loss.kl_coef", "model.hf", "optimizer.betas", "prefix.contract", "replay.use_recorded_routing",
    ]  # fmt: skip


def test_a_run_older_than_a_setting_goes_on_with_its_default(write_config) -> None:
    path = write_config('[model]\nhf = "DIR"\n')
    saved = json.loads(json.dumps(load_config(path).model_dump(mode="json")))
    del saved["adapter"], saved["model"]["max_positions"]
    assert differing_settings(saved, load_config(path)) == []
    asked = load_config(path, ["adapter.rank=4", "model.max_positions=99"])
    assert differing_settings(saved, asked) == ["adapter.rank", "model.max_positions"]


def test_the_keys_of_an_adapter_are_read(write_config) -> None:
    config = load_config(
        write_config(
            """
            model = { hf = "DIR" }
            [adapter]
            rank = 8
            alpha = 16
            targets = ["q_proj", "v_proj"]
            experts = true
            init = "gaussian"
            dtype = "model"
            """
        )
    )
    assert config.adapter.model_dump() == {
        "rank": 8,
        "alpha": 16.0,
        "targets": ("q_proj", "v_proj"),
        "experts": True,
        "init": "gaussian",
        "dtype": "model",
        "path": None,
    }
    assert config.adapter.on and not load_config(write_config('[model]\nhf = "DIR"\n')).adapter.on
