"""A rank's random states as bytes, and back: python, numpy, torch, the device, Megatron-Core's tracker."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch

from megatron_lrl.runtime import Runtime


def pack_rng(runtime: Runtime) -> bytes:
    """All random states of this rank as UTF-8 JSON."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _hex(torch.get_rng_state()),
        "tracker": {key: _hex(value) for key, value in get_cuda_rng_tracker().get_states().items()},
    }
    if runtime.device.type != "cpu":
        state["device"] = _hex(torch.get_device_module(runtime.device).get_rng_state(runtime.device))
    return json.dumps(state).encode()


def unpack_rng(content: bytes, runtime: Runtime) -> None:
    """Restore what `pack_rng` returned. Raises ValueError or KeyError for anything else."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    state = json.loads(content)
    version, internal, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    get_cuda_rng_tracker().set_states({key: _bytes(value) for key, value in state["tracker"].items()})
    if "device" in state and runtime.device.type != "cpu":
        device = torch.get_device_module(runtime.device)
        device.set_rng_state(_bytes(state["device"]), runtime.device)


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy().tobytes()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
