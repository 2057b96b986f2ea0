"""Sees every operation's result type, so that "fp64 throughout" can be shown rather than believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FloatWatch(TorchDispatchMode):
    """Counts, by name, operations with a floating-point result of another dtype than `expected`.

    The backward pass is seen too: after `with FloatWatch(torch.float64) as watch: loss().backward()` an fp64
    path has an empty `watch.strangers` and a positive `watch.seen`.
    """

    def __init__(self, expected: torch.dtype) -> None:
        super().__init__()
        self.expected = expected
        self.seen = 0
        self.strangers: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.seen += 1
                if leaf.dtype != self.expected:
                    self.strangers[f"{func} -> {leaf.dtype}"] += 1
        return result
