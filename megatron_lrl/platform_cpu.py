"""Lets Megatron-Core 0.19 run without a GPU. Does nothing where CUDA is present.

Megatron-Core spells ``device="cuda"`` and asks ``torch.cuda`` for streams, events, devices and random states in
places that a CPU run reaches too. `install` answers those calls for the CPU, once, before ``megatron.core`` is
imported. ``torch.cuda.is_available()`` stays False, so no code mistakes the machine for one with a GPU.

Every patched name is listed in `PATCHED_NAMES`; a test holds that each still exists.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import warnings
from collections.abc import Callable
from typing import Any

import torch

PATCHED_NAMES = (
    "torch.compile",
    "torch.cuda.current_device",
    "torch.cuda.synchronize",
    "torch.cuda.current_stream",
    "torch.cuda.stream",
    "torch.cuda.Stream",
    "torch.cuda.Event",
    "torch.cuda.manual_seed",
    "torch.cuda.get_rng_state",
    "torch.cuda.random.get_rng_state",
    "torch.zeros",
    "torch.ones",
    "torch.empty",
    "torch.full",
    "torch.tensor",
    "torch.empty_like",
    "torch.Tensor.cuda",
    "torch.Tensor.type",
    "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
    "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "megatron.core.tensor_parallel.random.CheckpointWithoutOutput",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    "megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue",
)

_installed = False


class _CpuStream:
    """Stands for a CUDA stream and for an event: on the CPU all work is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _CpuStream:
        return self

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: Any) -> float:
        return 0.0


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that reads a CUDA device as the CPU and ignores pinning."""

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return call


def _not_compiled(model: Any = None, **_: Any) -> Any:
    """`torch.compile`, as a call or a decorator, that leaves functions and modules as they are."""
    return (lambda function: function) if model is None else model


def install() -> None:
    """Make Megatron-Core importable and runnable on the CPU. Safe to call again; a no-op on a CUDA machine."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _patch_torch()
    warnings.filterwarnings("ignore", message=".*CPU RNG state changed.*")
    _patch_megatron()


def _patch_torch() -> None:
    from torch.utils._device import _device_constructors

    # `with torch.device(...)` recognises factories by identity, from a cache filled at its first use. Fill it with the
    # real ones, or the context would no longer reach them (transformers builds models under the meta device).
    _device_constructors()

    # The jit fuser is torch.compile, bound at import: it would compile C++ on the first step, and its machinery takes
    # two seconds to import.
    torch.compile = _not_compiled
    cpu = torch.device("cpu")
    stream = _CpuStream()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: stream
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.Stream = _CpuStream
    cuda.Event = _CpuStream
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.random.get_rng_state = cuda.get_rng_state
    for name in ("zeros", "ones", "empty", "full", "tensor", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    plain_type = tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Optimizers compare ``tensor.type()`` with 'torch.cuda.FloatTensor'."""
        answer = plain_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if not args and not kwargs else answer

    tensor.type = cuda_type


def _patch_megatron() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as tp_random
    from megatron.core.transformer.moe import token_dispatcher

    filesystem: Any = filesystem_async
    rng: Any = tp_random
    dispatcher: Any = token_dispatcher
    # A synchronous save would otherwise start a manager process (5.7 s, and it hangs in an unguarded __main__).
    filesystem._results_queue = queue.Queue()
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    checkpoint_init = rng.CheckpointWithoutOutput.__init__

    def init_without_fp8(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        """The default ``fp8=False`` is read as "on"."""
        checkpoint_init(self, fp8 or None, *args, **kwargs)

    rng.CheckpointWithoutOutput.__init__ = init_without_fp8
    move = dispatcher.maybe_move_tensor_to_cpu

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """All-to-all splits must not stay tensors."""
        if isinstance(tensor, torch.Tensor) and not tensor.is_cuda and as_numpy:
            return tensor.numpy()
        return move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    dispatcher.maybe_move_tensor_to_cpu = move_to_cpu
    _patch_uneven_splits(mappings)


def _patch_uneven_splits(mappings: Any) -> None:
    """gloo gathers and reduce-scatters equal parts only; experts under tp send unequal ones. Pad, and cut again."""
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def padded(part: torch.Tensor, length: int) -> torch.Tensor:
        return torch.cat([part, part.new_zeros(length - part.shape[0], *part.shape[1:])])

    def gather_uneven(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or len(set(output_split_sizes)) == 1:
            return gather(input_, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        parts = gather(padded(input_, longest), group).split(longest)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter_uneven(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or len(set(input_split_sizes)) == 1:
            return reduce_scatter(input_, group, None, use_global_buffer)
        longest = max(input_split_sizes)
        parts = torch.cat([padded(part, longest) for part in input_.split(list(input_split_sizes))])
        return reduce_scatter(parts, group)[: input_split_sizes[group.rank()]]

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = reduce_scatter_uneven
