"""Models without storage: everything that is created lies on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class OnMeta(TorchDispatchMode):
    """Puts every tensor that is created, or moved to a device, on the meta device, whatever device is named.

    ``call(func, args, kwargs)`` runs each operation.
    """

    _kinds: dict[Any, tuple[bool, bool]] = {}  # noqa: RUF012 - schemas do not change

    def __init__(self, call: Callable[[Any, Any, Any], Any] = _call) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._kinds:
            arguments = func._schema.arguments
            has_device = any(argument.name == "device" for argument in arguments)
            self._kinds[func] = has_device, any("Tensor" in str(argument.type) for argument in arguments)
        has_device, reads_tensors = self._kinds[func]
        if has_device and (not reads_tensors or kwargs.get("device") is not None):
            kwargs = {**kwargs, "device": META}
        return self._call(func, args, kwargs)
