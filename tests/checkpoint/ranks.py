"""Rank functions of the checkpoint tests: each sets up the runtime and works through a list of cases."""

from __future__ import annotations

from typing import Any

import torch
from harness import World

from megatron_lrl.checkpoint.hf_export import export_checkpoint, gather_hf_tensors, write_hf_file
from megatron_lrl.checkpoint.hf_import import import_checkpoint, load_checkpoint_weights, load_hf_weights
from megatron_lrl.errors import UserError
from megatron_lrl.models.build import build_model
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.precision import Precision
from megatron_lrl.runtime import Layout, Runtime, runtime_scope


def _layout(world: World) -> Layout:
    return Layout(tp=world.tp, cp=world.cp, pp=world.pp, ep=world.ep)


def import_all(world: World, cases: list[tuple[str, str]]) -> int:
    """Imports each (Hugging Face directory, checkpoint)."""
    with runtime_scope(_layout(world)) as runtime:
        for hf_dir, ckpt_dir in cases:
            import_checkpoint(hf_dir, ckpt_dir, runtime)
        return runtime.rank


def export_all(world: World, cases: list[tuple[str, str]]) -> int:
    """Exports each (checkpoint, Hugging Face directory)."""
    with runtime_scope(_layout(world)) as runtime:
        for ckpt_dir, hf_dir in cases:
            export_checkpoint(ckpt_dir, hf_dir, runtime)
        return runtime.rank


def _gather(model: torch.nn.Module, arch: Any, runtime: Runtime) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in gather_hf_tensors(model, arch, runtime)}


def _stored_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}


def load_both_ways(world: World, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """For each (Hugging Face directory, checkpoint of it): the float32 weights gathered after loading
    either one.
    """
    results = []
    with runtime_scope(_layout(world)) as runtime:
        for hf_dir, ckpt_dir in cases:
            arch = read_architecture(hf_dir)
            loaded = []
            for load, source in ((load_hf_weights, hf_dir), (load_checkpoint_weights, ckpt_dir)):
                model = build_model(arch, runtime, Precision(torch.float32))
                held = {**dict(model.named_parameters()), **_stored_buffers(model)}
                for tensor in held.values():
                    tensor.data.fill_(float("nan"))  # whatever stays unfilled shows
                load(model, arch, source, runtime)
                unfilled = [n for n, p in held.items() if not bool(torch.isfinite(p).all())]
                loaded.append({"weights": _gather(model, arch, runtime), "unfilled": unfilled})
            results.append({"hf": loaded[0], "checkpoint": loaded[1]})
    return results


def write_gradients(world: World, hf_dir: str, path: str) -> list[str]:
    """Gives every parameter the gradient 2 x its value and writes the gradient file; returns local names."""
    with runtime_scope(_layout(world)) as runtime:
        arch = read_architecture(hf_dir)
        model = build_model(arch, runtime, Precision(torch.float32))
        load_hf_weights(model, arch, hf_dir, runtime)
        for parameter in model.parameters():
            parameter.grad = 2 * parameter.detach()
        write_hf_file(model, arch, path, runtime)
        return [name for name, _ in model.named_parameters()]


def refused(world: World, cases: list[tuple[str, str, str]]) -> list[str]:
    """For each (verb, source, target), verb `import`, `export` or `load`: the message of the UserError.

    `load` reads checkpoint `target` into a model of Hugging Face directory `source`.
    """
    messages = []
    with runtime_scope(_layout(world)) as runtime:
        for verb, source, target in cases:
            try:
                if verb == "import":
                    import_checkpoint(source, target, runtime)
                elif verb == "export":
                    export_checkpoint(source, target, runtime)
                else:
                    arch = read_architecture(source)
                    load_checkpoint_weights(
                        build_model(arch, runtime, Precision(torch.float32)), arch, target, runtime
                    )
            except UserError as error:
                messages.append(str(error))
            else:
                messages.append("accepted")
    return messages
