"""Rank functions of test_residual: what flows between layers while a window's gradient is taken.

A case is that of `worlds.ranks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from harness.worlds import World
from torch import Tensor, nn

from megatron_lrl.checkpoint.hf_export import write_hf_file
from megatron_lrl.rl import verbs
from megatron_lrl.rl.accumulate import accumulate
from worlds.ranks import Case, config_of, opened, scope


class Stream:
    """Names of dtypes seen, and whether any value between two layers was finer than bfloat16."""

    def __init__(self) -> None:
        self.between: set[str] = set()  # layers: their input and output
        self.gradients: set[str] = set()  # of a layer's output
        self.inside: set[str] = set()  # outputs of norms: what attention, MLP and head compute with
        self.finer = {"received": False, "handed on": False}  # by the stage's first and last layer

    def layer_ran(self, which: str, x: Tensor) -> None:
        self.between.add(str(x.dtype))
        with torch.no_grad():
            self.finer[which] |= bool((x != x.to(torch.bfloat16).to(x.dtype)).any())
        if x.requires_grad:
            x.register_hook(lambda dx: self.gradients.add(str(dx.dtype)))


@contextmanager
def watched(model: nn.Module) -> Iterator[Stream]:
    stream, layers = Stream(), list(model.decoder.layers)
    hooks: list[Any] = []
    for i, layer in enumerate(layers):

        def ran(
            _module: Any,
            args: Any,
            kwargs: Any,
            output: Any,
            first: bool = i == 0,
            last: bool = layer is layers[-1],
        ) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            stream.between.add(str(hidden.dtype))
            if first:
                stream.layer_ran("received", hidden)
            if last:
                stream.layer_ran("handed on", output[0])
            else:
                stream.between.add(str(output[0].dtype))

        hooks.append(layer.register_forward_hook(ran, with_kwargs=True))
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            hooks.append(norm.register_forward_hook(lambda _m, _a, out: stream.inside.add(str(out.dtype))))
    if model.post_process:
        final = model.decoder.final_layernorm
        hooks.append(final.register_forward_hook(lambda _m, _a, out: stream.inside.add(str(out.dtype))))
    try:
        yield stream
    finally:
        for hook in hooks:
            hook.remove()


def gradients(world: World, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Each case's window: its gradient to `out`, its log-probabilities to `scores`, and what this rank saw flow."""
    found = []
    with scope(world) as runtime:
        for case in cases:
            with opened(world, case, runtime) as (run, window, plan), watched(run.core(run.model)) as stream:
                accumulate(window, plan)
                window.reduce()
                write_hf_file(run.model, run.arch, case["out"], runtime)
                sends_float32 = run.core(run.model).config.pipeline_dtype == torch.float32
            verbs.score(config_of(world, case), runtime, case["trajectories"], case["scores"])
            found.append({**vars(stream), "stage": runtime.pp_rank, "sends float32": sends_float32})
    return found
