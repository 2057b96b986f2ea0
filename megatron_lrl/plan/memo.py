"""What a meta kernel returned once, it returns again: shapes of operators that were seen are not computed anew.

torch computes most shapes on the meta device in Python, hundreds of microseconds an operator, and a rehearsal asks
for the same few hundred shapes tens of thousands of times. Remembered is an operator of aten's own that either

    makes tensors     and gives them storages of their own, as large as their strides need
    changes one       of its arguments and returns it with the size, strides and storage that it had before

Everything else (views, collectives, custom operators, what returns no tensor or allocates otherwise) runs every time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

META = torch.device("meta")
_OTHER = -1


class ShapeMemo:
    """Calls operators on meta tensors; the second call with the same shapes and arguments runs no kernel."""

    def __init__(self) -> None:
        self._written: dict[Any, int | str | None] = {}
        self._made: dict[Any, tuple[bool, tuple[tuple, ...]]] = {}
        self._unchanged: set[Any] = set()

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``, or tensors just like those that it would return."""
        if func not in self._written:
            self._written[func] = _written(func)
        written = self._written[func]
        key = None if written == _OTHER else _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if written is not None:
            changed = args[written] if isinstance(written, int) else kwargs[written]
            return self._change(key, changed, func, args, kwargs)
        if (made := self._made.get(key)) is not None:
            single, specs = made
            fresh = [
                torch.empty_strided(size, stride, dtype=dtype, device=META) for size, stride, dtype in specs
            ]
            return fresh[0] if single else tuple(fresh)
        output = func(*args, **kwargs)
        outputs = (output,) if isinstance(output, Tensor) else output
        if isinstance(outputs, tuple) and _own_their_storages(outputs, args, kwargs):
            specs = tuple((tuple(x.shape), x.stride(), x.dtype) for x in outputs)
            self._made[key] = isinstance(output, Tensor), specs
        return output

    def _change(self, key: Any, changed: Tensor, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if key in self._unchanged:
            return changed
        before = _described(changed)
        output = func(*args, **kwargs)
        if output is changed and _described(changed) == before:
            self._unchanged.add(key)
        return output


def _written(func: Any) -> int | str | None:
    """Place or name of the one argument that an operator changes and returns; None if it makes tensors.

    `_OTHER` for everything else.
    """
    schema = func._schema
    returned = [str(value.type) for value in schema.returns]
    if func.namespace != "aten" or not returned or any(kind != "Tensor" for kind in returned):
        return _OTHER
    aliased = [value.alias_info is not None for value in schema.returns]
    places = [i for i, argument in enumerate(schema.arguments) if argument.alias_info is not None]
    if not places and not any(aliased):
        return None
    if len(places) == len(returned) == 1 and schema.arguments[places[0]].alias_info.is_write:
        argument = schema.arguments[places[0]]
        return argument.name if argument.kwarg_only else places[0]
    return _OTHER


def _key(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Equal for calls whose outputs look alike; None if an argument is beyond comparison."""
    parts: list[Any] = [func]
    try:
        _describe(args, parts)
        if kwargs:
            _describe(tuple(sorted(kwargs.items())), parts)
        return tuple(parts)
    except TypeError:
        return None


def _describe(values: Any, parts: list[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            if value.device != META or type(value) not in (Tensor, torch.nn.Parameter):
                raise TypeError
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(len(value))
            _describe(value, parts)
        else:
            hash(value)
            parts.append((type(value), value))  # 1, 1.0 and True are equal, and not the same


def _own_their_storages(outputs: tuple, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether outputs are meta tensors that share nothing, with what their strides need and no more."""
    if not all(isinstance(x, Tensor) and type(x) is Tensor and x.device == META for x in outputs):
        return False
    storages = {x.untyped_storage()._cdata for x in outputs}
    given: list[Tensor] = []
    _tensors((args, tuple(kwargs.values())), given)
    if len(storages) < len(outputs) or storages & {x.untyped_storage()._cdata for x in given}:
        return False
    return all(x.storage_offset() == 0 and x.untyped_storage().nbytes() == _needed(x) for x in outputs)


def _needed(tensor: Tensor) -> int:
    """Bytes of a storage that holds nothing else."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _tensors(values: Any, found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _tensors(value, found)


def _described(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()


__all__ = ["ShapeMemo"]
