"""Where a plan runs: one rank's real modules and passes on the meta device, without storage, peers or kernels.

    planned_world   a world of N ranks in one process (torch's fake process groups); `plan` opens it
    rehearsal       inside: every new tensor is a meta tensor, every pass goes through one stage; experts are chosen
                    evenly

Both restore what they replace when their block ends; nothing outside them changes. A rehearsal also works beside a real
run: collectives of meta tensors talk to nobody.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl import platform_cpu
from megatron_lrl.runtime import Layout, Runtime, check_world, model_parallel_groups, shutdown_runtime, unwrap

platform_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.utils import GlobalMemoryBuffer  # noqa: E402

from megatron_lrl.layers.kinds import kinds_of, stand_ins  # noqa: E402
from megatron_lrl.models.meta import META, OnMeta  # noqa: E402
from megatron_lrl.passes import schedule  # noqa: E402
from megatron_lrl.plan.memo import ShapeMemo  # noqa: E402

T = TypeVar("T")

REPLACED_NAMES = (
    "torch.Tensor.type",
    "torch.distributed.all_gather_object",
    "megatron.core.parallel_state._GLOBAL_MEMORY_BUFFER",
    "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork",
    "megatron_lrl.passes.schedule.get_forward_backward_func",
    *(stand_in.path for stand_in in stand_ins()),
)
"""What a rehearsal replaces while its block is open; a test holds that each exists and comes back."""

_TYPE_NAMES = {
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float64: "Double",
}


class PlannedRuntime(Runtime):
    """A runtime whose rank decides for itself: there is nobody to agree with."""

    def barrier(self) -> None: ...

    def agree(self, failure: Exception | None) -> None:
        """Raise the failure, if there is one."""
        if failure is not None:
            raise failure

    def gather_objects(self, value: T, group: Any = None) -> list[T]:
        """``value`` as if every rank had the same."""
        return [value] * (self.world_size if group is None else group.size())


@contextmanager
def planned_world(layout: Layout, world_size: int, rank: int) -> Iterator[PlannedRuntime]:
    """The place of one rank in a world that does not exist.

    Raises `UserError` if the layout does not divide the world, RuntimeError if torch.distributed is already up.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    check_world(layout, world_size)
    if dist.is_initialized():
        raise RuntimeError("a planned world needs a process without torch.distributed")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        groups = model_parallel_groups(layout, gloo_groups=False)
        yield PlannedRuntime(META, rank, world_size, layout, groups)
    finally:
        shutdown_runtime()


def beside(runtime: Runtime) -> PlannedRuntime:
    """A planned runtime in the place of a real one's rank."""
    return PlannedRuntime(META, runtime.rank, runtime.world_size, runtime.layout, runtime.groups)


@contextmanager
def rehearsal(in_flight: int = 1) -> Iterator[None]:
    """Everything built and run in the block is planned: shapes, dtypes and graphs are real, values do not exist.

    ``in_flight``: graphs that this pipeline stage holds at once (1F1B). Passes through `run_schedule` return no
    data. A backward runs only where something that a plan counts comes to life in it (`LayerKind.adjoint_in_backward`).
    """
    plain_type: Callable[..., Any] = torch.Tensor.type

    def type_name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron-Core's optimizers compare it with names of CUDA tensors."""
        if self.device == META and not args and not kwargs and self.dtype in _TYPE_NAMES:
            return f"torch.cuda.{_TYPE_NAMES[self.dtype]}Tensor"
        return plain_type(self, *args, **kwargs)

    def gather_alone(everyone: list[Any], mine: Any, group: Any = None) -> None:
        everyone[:] = [mine] * len(everyone)

    with ExitStack() as stack:
        # Passes make and free many small objects: what is there already need not be searched for cycles each time.
        gc.freeze()
        stack.callback(gc.unfreeze)
        stack.enter_context(_replaced(torch.Tensor, "type", type_name))
        stack.enter_context(_replaced(dist, "all_gather_object", gather_alone))
        # Megatron-Core keeps gathered activations in one buffer for good: a real one must not come in, nor a
        # meta one stay.
        stack.enter_context(_replaced(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer()))
        # No dropout: random states are neither read nor moved on.
        stack.enter_context(_replaced(CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext()))
        stack.enter_context(flights(in_flight))
        for stand_in in stand_ins():
            stack.enter_context(_replaced(*stand_in))
        stack.enter_context(OnMeta(ShapeMemo().call))
        yield


@contextmanager
def flights(in_flight: int) -> Iterator[None]:
    """Inside a rehearsal: a pipeline stage holds so many graphs at once."""
    with _replaced(schedule, "get_forward_backward_func", lambda: _one_stage(in_flight)):
        yield


def _one_stage(in_flight: int) -> Callable[..., list[Any]]:
    """Stands for Megatron-Core's schedules: passes of one stage, ``in_flight`` graphs alive at a time."""

    def run(
        *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **_: Any
    ) -> list[Any]:
        stage = model[0]
        core = unwrap(stage)
        held: deque[Tensor] = deque()
        backward = any(kind.adjoint_in_backward for kind in kinds_of(core.arch))
        hook = core.register_forward_pre_hook(_receive, with_kwargs=True)

        def end_oldest() -> None:
            output = held.popleft()
            if backward and output.requires_grad:
                output.backward(torch.zeros_like(output))

        try:
            for _number in range(num_microbatches):
                held.append(forward_step_func(data_iterator, stage)[0])
                if len(held) == in_flight:
                    end_oldest()
            while held:
                end_oldest()
        finally:
            hook.remove()
        return []

    return run


def _receive(core: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    """What a stage would have received from the one before it: hidden states [m (/ tp), 1, hidden]."""
    if core.pre_process:
        return
    config = core.config
    slots = kwargs["input_ids"].shape[1] // (
        config.tensor_model_parallel_size if config.sequence_parallel else 1
    )
    hidden = torch.empty(slots, 1, config.hidden_size, dtype=config.pipeline_dtype)
    core.set_input_tensor([hidden.requires_grad_(torch.is_grad_enabled())])


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
