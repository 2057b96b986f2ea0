"""Rank functions of the LastKV conversion tests: several steps in one open runtime."""

from __future__ import annotations

import os
from typing import Any

import torch
from harness import World

from megatron_lrl.checkpoint.hf_export import export_checkpoint, gather_hf_tensors
from megatron_lrl.checkpoint.hf_import import import_checkpoint
from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.open import load_policy, open_run, read_model_architecture
from megatron_lrl.models.hf_config import LastKVSpec
from megatron_lrl.rl import verbs
from megatron_lrl.runtime import Layout, Runtime, runtime_scope


def _convert(runtime: Runtime, verb: str, source: str, target: str, options: dict[str, Any]) -> None:
    if verb == "export":
        export_checkpoint(source, target, runtime)
        return
    spec = LastKVSpec(options["chunk"], options.get("blend", True)) if "chunk" in options else None
    import_checkpoint(source, target, runtime, spec, options.get("gate_init"))


def convert(world: World, cases: list[tuple[str, str, str, dict[str, Any]]]) -> int:
    """Each (verb, source, target, options), verb `import` or `export`; options: chunk, blend, gate_init."""
    with runtime_scope(Layout(tp=world.tp, pp=world.pp)) as runtime:
        for case in cases:
            _convert(runtime, *case)
        return runtime.rank


def refused(world: World, cases: list[tuple[str, str, str, dict[str, Any]]]) -> list[str]:
    """As `convert`, and verb `load`: loads the model of `options["settings"]`. The messages of the UserErrors."""
    messages = []
    with runtime_scope(Layout(tp=world.tp, pp=world.pp)) as runtime:
        for verb, source, target, options in cases:
            try:
                if verb == "load":
                    config = load_config(os.devnull, [*world.overrides, *options["settings"]])
                    arch = runtime.together(read_model_architecture, config)
                    load_policy(config, runtime, arch)
                else:
                    _convert(runtime, verb, source, target, options)
            except UserError as error:
                messages.append(str(error))
            else:
                messages.append("accepted")
    return messages


def loaded(world: World, cases: list[list[str]]) -> list[dict[str, Any]]:
    """Each case's settings: the loaded weights under Hugging Face names, what stayed unset, the identity's words."""
    found = []
    with runtime_scope(Layout(tp=world.tp, pp=world.pp)) as runtime:
        for settings in cases:
            with open_run(load_config(os.devnull, [*world.overrides, *settings]), runtime) as run:
                weights = {n: t.clone() for n, t in gather_hf_tensors(run.model, run.arch, runtime)}
                identity = run.identity((1, 2, 3))
                unset = [n for n, p in run.model.named_parameters() if not bool(torch.isfinite(p).all())]
                words = {"attention": identity.attention, "model": identity.model}
                found.append({"weights": weights, "unset": unset, **words})
    return found


def score(world: World, cases: list[tuple[list[str], str]], trajectories: str) -> int:
    """Each (settings, file to write): the `score` verb."""
    with runtime_scope(Layout(tp=world.tp, pp=world.pp)) as runtime:
        for settings, out in cases:
            config = load_config(os.devnull, [*world.overrides, *settings])
            verbs.score(config, runtime, trajectories, out)
        return runtime.rank
