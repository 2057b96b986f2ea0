"""torch.cuda as a machine with GPUs shows it, and tensors made on one as `PretendTensor`s."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
import torch._dynamo

from cuda_audit.pretend import Pretence, PretendTensor

DEVICES = 8
_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "arange",
    "eye",
    "randint",
    "randperm",
    "linspace",
)


class Stream:
    """A stream or an event; all work is done when a call returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> Stream:
        return self

    def synchronize(self) -> None:
        Pretence.current().wait("synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: Any) -> float:
        return 0.0


class Generator(torch._C.Generator):
    """torch.Generator("cuda") computes on the CPU and says where it belongs."""

    pretend = "cpu"

    def __new__(cls, device: Any = "cpu") -> Generator:
        self = super().__new__(cls, device="cpu")
        self.pretend = torch.device(device).type
        return self


def install(local_rank: int = 0) -> Pretence:
    """Give this process the pretended device ``cuda:local_rank``. Call before megatron.core is imported; for good."""
    assert not torch.cuda.is_available(), "this machine has a GPU: run the tests marked gpu"
    from torch.utils._device import _device_constructors

    _device_constructors()
    torch._dynamo.config.disable = True  # the jit fuser is torch.compile, bound at import
    PretendTensor.index = local_rank
    Pretence._current = pretence = Pretence()
    _patch_cuda(local_rank, pretence)
    _patch_tensor()
    for name in _FACTORIES:
        _note_program(name)
    for name in ("tensor", "as_tensor"):
        _through_host(name)
    pretence.__enter__()
    return pretence


def _patch_cuda(local_rank: int, pretence: Pretence) -> None:
    device, stream = torch.device("cuda", local_rank), Stream()
    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        name="Pretend", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32
    )
    constants = {
        "is_available": True, "device_count": DEVICES, "current_device": local_rank, "is_initialized": True,
        "get_device_capability": (9, 0), "get_device_properties": properties, "get_device_name": "Pretend",
        "current_stream": stream, "default_stream": stream, "memory_allocated": 0, "max_memory_allocated": 0,
        "memory_reserved": 0, "max_memory_reserved": 0, "memory_stats": {}, "empty_cache": None, "init": None,
        "_lazy_init": None, "reset_peak_memory_stats": None, "is_bf16_supported": True,
        "is_current_stream_capturing": False, "mem_get_info": (80 << 30, 80 << 30), "ipc_collect": None,
    }  # fmt: skip
    for name, value in constants.items():
        setattr(cuda, name, lambda *_, value=value, **__: value)

    def set_device(wanted: Any) -> None:
        found = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)
        assert found == device, f"this rank is {device}, not {found}"

    cuda.set_device = set_device
    cuda.synchronize = lambda *_, **__: pretence.wait("synchronize")
    cuda.stream = cuda.device = cuda.device_of = lambda *_, **__: contextlib.nullcontext()
    cuda.Stream, cuda.Event = Stream, Stream
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda._lazy_call = lambda call, **_: call()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.default_generators = (torch.default_generator,) * DEVICES
    optimizer: Any = torch.optim.Optimizer
    optimizer._accelerator_graph_capture_health_check = lambda _: None
    torch.Generator = Generator  # type: ignore[misc]
    for name in ("FloatTensor", "BFloat16Tensor", "HalfTensor", "DoubleTensor", "IntTensor", "LongTensor"):
        setattr(cuda, name, _typed(getattr(torch, name).dtype, device))


def _typed(dtype: torch.dtype, device: torch.device) -> Any:
    return lambda data: torch.tensor(data, dtype=dtype, device=device)


def _patch_tensor() -> None:
    """What the C++ side would take for an operation on a CPU tensor, or without a device at all."""
    tensor: Any = torch.Tensor
    plain_data = torch._C.TensorBase.data

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(self, PretendTensor) == isinstance(value, PretendTensor):
            plain_data.__set__(self, value)
            return
        # The parameter moves to (or from) the device and stays the same object.
        other = value.detach().requires_grad_(self.requires_grad)
        kept = dict(self.__dict__)
        if isinstance(self, torch.nn.Parameter):
            kept["_is_param"] = True
        torch.utils.swap_tensors(self, other)
        self.__dict__.update(kept)

    tensor.data = property(lambda self: plain_data.__get__(self), set_data)
    tensor.cuda = lambda self, device=None, non_blocking=False, **_: self.to(
        torch.device("cuda", PretendTensor.index), non_blocking=non_blocking
    )
    plain_to = tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], str | int | torch.device):
            args = (_indexed(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = _indexed(kwargs["device"])
        return plain_to(self, *args, **kwargs)

    tensor.to = to
    tensor.pin_memory = lambda self, *_: self.clone()


def _indexed(device: Any) -> torch.device:
    """A device as the C++ side would find it, without asking the CUDA runtime which one is current."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return (
        torch.device("cuda", PretendTensor.index) if found.type == "cuda" and found.index is None else found
    )


def _note_program(name: str) -> None:
    """A factory that the program calls says where its tensor goes; one that C++ code calls does not."""
    factory, pretence = getattr(torch, name), Pretence.current()

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None:
            kwargs["device"] = _indexed(kwargs["device"])
        before, pretence.by_program = pretence.by_program, True
        try:
            return factory(*args, **kwargs)
        finally:
            pretence.by_program = before

    call.__name__ = name
    setattr(torch, name, call)


def _through_host(name: str) -> None:
    """torch.tensor(values, device="cuda") makes a tensor of the host and copies it, as torch itself does."""
    factory = getattr(torch, name)

    def call(data: Any, *, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, PretendTensor):
            return data.to(dtype=kwargs.get("dtype"), device=device)
        made = factory(data, **kwargs)
        return made if device is None else made.to(_indexed(device))

    call.__name__ = name
    setattr(torch, name, call)
