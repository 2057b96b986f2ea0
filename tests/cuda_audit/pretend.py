"""Tensors that compute on the CPU but are, to the program, on a CUDA device.

`Pretence.install` makes torch show CUDA devices. A tensor made on one, or moved to one, is a `PretendTensor`: real
numbers in ordinary memory, with ``device`` and ``is_cuda`` of a GPU. Every operation passes `Pretence.dispatch`, which

    refuses   tensors of both kinds in one operation (but what CUDA allows: numbers in CPU tensors of no dimension, CPU
              indices), and tensors of two devices; a write through the CPU's memory (numpy, tolist)
    records   each point where the host would wait for the device: .item(), bool(), .cpu(), nonzero, a copy from the
              host that blocks; with the line of the program it came from
    stands in for kernels that only CUDA has (`kernels_of_cuda`), after the checks that the real ones make

A stand-in for a device, not a model of one: it has no streams, no memory limit and no speed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from cuda_audit.kernels_of_cuda import KERNELS

PACKAGE = "megatron_lrl"
aten = torch.ops.aten

_WAITS = {  # the size of the result is decided on the device
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::equal", "aten::is_nonzero",
}  # fmt: skip
_MOVES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
_INDEXED = {
    "aten::index",
    "aten::index_put_",
    "aten::index_put",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}
_LISTS = {"aten::cat", "aten::stack", "aten::_foreach_add_"}
# The dispatcher asks for these on the way to another operation; they touch no data.
_SILENT = {"aten::lift", "aten::lift_fresh"}


class MixedDevices(RuntimeError):
    """What CUDA answers with "expected all tensors to be on the same device", and its like."""


class PretendTensor(torch.Tensor):
    """A tensor on a pretended CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    index: int = 0

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> PretendTensor:
        return torch.Tensor._make_subclass(cls, values, values.requires_grad)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", PretendTensor.index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return PretendTensor.index

    def type(self, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:
        if dtype is not None:
            return self.to(dtype, non_blocking=non_blocking)
        return torch._C.TensorBase.type(self).replace("torch.", "torch.cuda.", 1)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.to("cpu")

    def cuda(self, device: Any = None, **_: Any) -> torch.Tensor:
        return self

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like Tensor.to, which would take the tensor for one on the CPU."""
        device, dtype, non_blocking, *_ = torch._C._nn._parse_to(*args, **_parsable(kwargs))
        if args and isinstance(args[0], torch.Tensor):
            device, dtype = args[0].device, args[0].dtype
        if device is None or device.type == "cuda":
            _same_device(device)
            if (dtype is None or dtype == self.dtype) and not kwargs.get("copy"):
                return self
            return aten._to_copy(self, dtype=dtype)
        pretence = Pretence.current()
        pretence.leaving = True
        try:
            return aten._to_copy(self, dtype=dtype, device=device, non_blocking=bool(non_blocking))
        finally:
            pretence.leaving = False

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **kwargs})

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def pin_memory(self, *_: Any) -> torch.Tensor:
        raise RuntimeError("cannot pin a CUDA tensor: only dense CPU tensors can be pinned")

    def record_stream(self, stream: Any) -> None: ...

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else object.__format__(self, "")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PretendTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo.get(id(self))
        if copied is None:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied.__dict__.update(self.__dict__)
            memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            plain = torch.empty(0, dtype=self.dtype).set_(
                self.untyped_storage(), self.storage_offset(), self.shape, self.stride()
            )
        return (_unpickled, (plain.clone(), self.requires_grad))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Pretence.current().dispatch(func, args, kwargs or {})


def _unpickled(plain: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return plain.to(torch.device("cuda", PretendTensor.index)).requires_grad_(requires_grad)


def _parsable(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key in ("dtype", "non_blocking", "copy", "device")}


def _same_device(device: torch.device | None) -> None:
    if device is not None and device.index not in (None, PretendTensor.index):
        raise MixedDevices(f"this rank is on cuda:{PretendTensor.index}, but {device} was asked for")


class Pretence(TorchDispatchMode):
    """Sees every operation; see the module."""

    _current: Pretence | None = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()  # "kind file:line"
        self.operations = self.epoch = 0
        self.by_program = False  # a factory was called from Python
        self.leaving = (
            False  # inside PretendTensor.to: C++ code asks for the CPU where it means "where this tensor is"
        )

    @classmethod
    def current(cls) -> Pretence:
        assert cls._current is not None, "no pretence is installed"
        return cls._current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation as CUDA would."""
        name = func._schema.name
        if func is torch.ops.prim.device.default:
            return args[0].device
        self.operations += 1
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if name == "aten::detach" and getattr(args[0], "on_its_way", -1) == self.epoch:
            alias = func(*args, **kwargs)  # reads nothing yet
            alias.on_its_way = self.epoch
            return alias
        if any(getattr(x, "on_its_way", -1) == self.epoch for x in tensors):
            raise MixedDevices(
                f"{name} reads a copy from the device that did not block, and nothing waited for it"
            )
        tagged = any(isinstance(x, PretendTensor) for x in tensors)
        neutral = not tagged and (bool(tensors) and all(map(is_neutral, tensors)))
        wanted = kwargs.get("device")
        if name in _MOVES:
            return self._move(func, name, args, kwargs)
        if wanted is not None:
            wanted = torch.device(wanted)
            if wanted.type == "cuda":
                _same_device(wanted)
                kwargs, tagged = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}, True
                if not any(a.name == "pin_memory" for a in func._schema.arguments):
                    del kwargs["pin_memory"]
        if not tensors and not tagged and not self.by_program:
            neutral = True
        self._check(name, tensors, args, kwargs) if tagged else None
        if tagged and (name in _WAITS or (name in _INDEXED and _by_mask(args))):
            self.wait(name.removeprefix("aten::"))
        stand_in = KERNELS.get(name)
        with torch._C._DisableTorchDispatch():
            result = (stand_in or func)(*args, **kwargs)
        if tagged:
            return tree_map(_tag, result)
        return tree_map(_set_neutral if neutral else partial(_remember, tensors), result)

    def wait(self, kind: str) -> None:
        """The host waits for the device here, and with it for every copy under way."""
        self.epoch += 1
        self.waits[f"{kind} {_program_line()}"] += 1

    def _move(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """A copy, perhaps between the host and the device."""
        if name == "aten::_to_copy":
            source, device = args[0], kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                _same_device(torch.device(device))
            from_cuda = isinstance(source, PretendTensor)
            stays = device is None or (from_cuda and not self.leaving and torch.device(device).type == "cpu")
            to_cuda = from_cuda if stays else torch.device(device).type == "cuda"
            meta = device is not None and torch.device(device).type == "meta"
            plain = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")}
            if meta:
                plain["device"] = torch.device("meta")
        else:
            target, source = args[0], args[1]
            to_cuda, from_cuda = isinstance(target, PretendTensor), isinstance(source, PretendTensor)
            plain, meta = kwargs, source.device.type == "meta" or target.device.type == "meta"
        non_blocking = bool(
            kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])
        )
        if to_cuda != from_cuda and not meta:
            kind = "to device" if to_cuda else "to host"
            if not non_blocking:
                self.wait(kind)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **plain)
        if from_cuda and not to_cuda and non_blocking and not meta:
            result.on_its_way = self.epoch  # until the host waits
        return tree_map(_tag, result) if to_cuda and name == "aten::_to_copy" and not meta else result

    def _check(self, name: str, tensors: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        """Raise `MixedDevices` where CUDA would raise."""
        for x in tensors:
            if isinstance(x, PretendTensor) or x.device.type == "meta" or is_neutral(x):
                continue
            if x.dim() == 0 and name not in _LISTS and not name.startswith("c10d"):
                continue
            if name in _INDEXED and any(x is y for y in tree_flatten(args[1])[0]):
                self.wait("indices to device")
                continue
            if name.startswith(("prim::", "profiler::")) or name in _SILENT:
                continue
            shapes = [(tuple(t.shape), str(t.device)) for t in tensors]
            made = getattr(x, "made_at", "before the pretence")
            raise MixedDevices(
                f"{name}: expected all tensors to be on the same device, found {shapes}; the CPU's was made at {made}"
            )
        generator = kwargs.get("generator")
        if generator is not None and getattr(generator, "pretend", "cpu") != "cuda":
            raise MixedDevices(f"{name}: a CPU generator for a CUDA tensor")


def _by_mask(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_flatten(args[1])[0])


def _tag(value: Any) -> Any:
    if (
        isinstance(value, torch.Tensor)
        and not isinstance(value, PretendTensor)
        and value.device.type == "cpu"
    ):
        return PretendTensor(value)
    return value


def is_neutral(x: torch.Tensor) -> bool:
    """Made by C++ code (a formula of the backward, a part of a larger operation): it means "where its inputs are"."""
    return getattr(x, "neutral", False)


def _set_neutral(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value.neutral = True  # type: ignore[attr-defined]
    return value


def _remember(sources: list[torch.Tensor], value: Any) -> Any:
    """Note where a tensor of the CPU was first made, for the message that refuses it."""
    if isinstance(value, torch.Tensor) and not isinstance(value, PretendTensor):
        origins = [x.made_at for x in sources if hasattr(x, "made_at")]
        value.made_at = origins[0] if origins else _program_line()  # type: ignore[attr-defined]
    return value


def _program_line() -> str:
    """The innermost line of the program, or of what the program called, on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        for root in (PACKAGE, "megatron"):
            if root in path.parts and "site-packages" not in path.parts[path.parts.index(root) :]:
                place = "/".join(path.parts[path.parts.index(root) :])
                return f"{place}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def called_from(names: tuple[str, ...]) -> Callable[[], bool]:
    """Whether a function of one of these names is on the stack."""

    def find() -> bool:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name in names:
                return True
            frame = frame.f_back
        return False

    return find
