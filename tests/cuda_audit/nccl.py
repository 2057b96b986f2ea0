"""torch.distributed with NCCL's rules, over gloo.

A group that is asked to be NCCL's is made of gloo and takes CUDA tensors only, contiguous ones, of NCCL's dtypes; one
that is asked to be gloo's takes CPU tensors only. A send returns when it was received, as NCCL's may: two ranks that
both begin with a send to each other, not in one `batch_isend_irecv`, wait here too. Every collective is recorded with
its group, so that a test can compare the order of ranks (a different order is a hang under NCCL).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cuda_audit.pretend import Pretence, PretendTensor, _program_line

NCCL_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool,
}  # fmt: skip


class NcclError(RuntimeError):
    """What NCCL refuses, or would hang on."""


class Rules:
    """The backends that groups were asked to have, and what went over them."""

    def __init__(self) -> None:
        self.default = "gloo"
        self.backend: dict[int, str] = {}
        self.calls: Counter[str] = Counter()
        self.sequence: dict[tuple[int, ...], list[str]] = {}  # ranks of the group -> collectives, in order
        self._inside = 0

    def of(self, group: Any) -> str:
        if group is None or group is dist.group.WORLD:
            return self.default
        return self.backend.get(id(group), self.default)

    def check(self, name: str, group: Any, tensors: list[Any]) -> None:
        """Raise `NcclError` for what the group's backend would refuse."""
        backend = self.of(group)
        for x in tensors:
            if not isinstance(x, torch.Tensor):
                continue
            where = f"{name} over {backend}"
            if backend == "nccl":
                if not isinstance(x, PretendTensor):
                    raise NcclError(f"{where}: no backend for a CPU tensor {tuple(x.shape)}")
                if not x.is_contiguous():
                    raise NcclError(f"{where}: tensors must be contiguous: {tuple(x.shape)} {x.stride()}")
                if x.dtype not in NCCL_DTYPES:
                    raise NcclError(f"{where}: {x.dtype} is not one of NCCL's")
            elif isinstance(x, PretendTensor):
                raise NcclError(f"{where}: a CUDA tensor {tuple(x.shape)}")

    def note(self, name: str, group: Any, tensors: list[Any]) -> None:
        self.calls[name] += 1
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        sizes = [
            tuple(x.shape) if name not in _RAGGED else () for x in tensors if isinstance(x, torch.Tensor)
        ]
        self.sequence.setdefault(ranks, []).append(f"{name} {sizes[:1]} {_program_line()}")


_RAGGED = {"all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv"}
_TENSORS: dict[str, Callable[..., list[Any]]] = {
    "all_reduce": lambda tensor, *_, **__: [tensor],
    "broadcast": lambda tensor, *_, **__: [tensor],
    "reduce": lambda tensor, *_, **__: [tensor],
    "all_gather": lambda tensor_list, tensor, *_, **__: [tensor, *tensor_list],
    "all_gather_into_tensor": lambda output_tensor, input_tensor, *_, **__: [output_tensor, input_tensor],
    "_all_gather_base": lambda output_tensor, input_tensor, *_, **__: [output_tensor, input_tensor],
    "reduce_scatter_tensor": lambda output, input, *_, **__: [output, input],
    "_reduce_scatter_base": lambda output, input, *_, **__: [output, input],
    "all_to_all_single": lambda output, input, *_, **__: [output, input],
    "gather": lambda tensor, gather_list=None, *_, **__: [tensor, *(gather_list or ())],
    "scatter": lambda tensor, scatter_list=None, *_, **__: [tensor, *(scatter_list or ())],
    "send": lambda tensor, *_, **__: [tensor],
    "recv": lambda tensor, *_, **__: [tensor],
    "isend": lambda tensor, *_, **__: [tensor],
    "irecv": lambda tensor, *_, **__: [tensor],
}
_AVERAGED = {"all_reduce", "reduce_scatter_tensor", "reduce"}


def install(rules: Rules | None = None) -> Rules:
    """Put the rules in front of torch.distributed, for this process and for good. Call before megatron.core."""
    rules = rules or Rules()
    start, new = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend not in ("nccl", "gloo", "fake"):
            raise NcclError(f"init_process_group: the backend is not named: {backend!r}")
        rules.default = backend
        kwargs.pop("device_id", None)
        start("gloo" if backend == "nccl" else backend, *args, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.pop("backend", None) or rules.default
        kwargs.pop("pg_options", None)
        group = new(*args, backend="gloo" if backend == "nccl" else backend, **kwargs)
        rules.backend[id(group)] = backend
        return group

    def get_backend(group: Any = None) -> str:
        return rules.of(group)

    namespaces = (dist, distributed_c10d)
    for name, value in {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "get_backend": get_backend,
    }.items():
        for namespace in namespaces:
            setattr(namespace, name, value)
    for name, tensors_of in _TENSORS.items():
        wrapped = _checked(
            rules, name, getattr(dist, name, None) or getattr(distributed_c10d, name), tensors_of
        )
        for namespace in namespaces:
            setattr(namespace, name, wrapped)
    _check_objects(rules, namespaces)
    _check_batches(rules, namespaces)
    distributed_c10d.barrier = dist.barrier
    return rules


def _checked(
    rules: Rules, name: str, call: Callable[..., Any], tensors_of: Callable[..., list[Any]]
) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        if group is None:
            group = next((x for x in args if isinstance(x, dist.ProcessGroup)), None)
        if rules._inside:
            return call(*args, **kwargs)
        tensors = tensors_of(*args, **kwargs)
        rules.check(name, group, tensors)
        rules.note(name, group, tensors)
        with torch._C._DisableTorchDispatch():  # the tensors are ordinary memory to gloo
            return call(*args, **kwargs)

    return checked


def _check_objects(rules: Rules, namespaces: tuple[Any, ...]) -> None:
    """Collectives of Python objects go over NCCL through device tensors, which the host waits for."""
    for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
        call = getattr(dist, name)

        def wrapped(*args: Any, call: Any = call, name: str = name, **kwargs: Any) -> Any:
            group = kwargs.get("group") or next((x for x in args if isinstance(x, dist.ProcessGroup)), None)
            if rules.of(group) == "nccl":
                Pretence.current().wait(name)
            rules.note(name, group, [])
            rules._inside += 1
            try:
                return call(*args, **kwargs)
            finally:
                rules._inside -= 1

        for namespace in namespaces:
            setattr(namespace, name, wrapped)


def _check_batches(rules: Rules, namespaces: tuple[Any, ...]) -> None:
    batch = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> Any:
        for operation in operations:
            rules.check("batch_isend_irecv", operation.group, [operation.tensor])
        rules.calls["batch_isend_irecv"] += 1
        rules._inside += 1
        try:
            with torch._C._DisableTorchDispatch():
                return batch(operations)
        finally:
            rules._inside -= 1

    for namespace in namespaces:
        namespace.batch_isend_irecv = batch_isend_irecv
