"""Claim: a rank that cannot write its file still takes its turns in putting optimizer state together, as others wait.

Why the test shows it: the writer fails where it opens the file, at the first item and between two turns; every turn is
counted. Not shown: real ranks and disks (`cli/test_full_disk.py`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_lrl.checkpoint.optimizer_state import Whole
from megatron_lrl.checkpoint.streaming import Live, _Writer


@pytest.mark.parametrize(("folder", "fails_at"), [("absent", 0), (".", 0), (".", 1), (".", 2)])
def test_every_turn_is_taken(folder: str, fails_at: int, tmp_path: Path) -> None:
    taken: list[int] = []
    state = {0: torch.zeros(3), **{number: torch.empty(3, device="meta") for number in (1, 2)}}
    views = Whole.__new__(Whole)
    Live.__init__(views)
    views._held, views._at_once = {}, 1

    def gather(number: int) -> torch.Tensor:
        taken.append(number)
        return torch.ones(3)

    places = {number: state[number].untyped_storage()._cdata for number in (1, 2)}
    views._turns = [(places[number], lambda number=number: gather(number)) for number in (1, 2)]
    views._left = iter(views._turns)

    def resolve(item: Any) -> torch.Tensor:
        if item.index == fails_at:
            raise OSError(28, "No space left on device")
        return views.of(state[item.index])

    planner = SimpleNamespace(views=views, lookup_object=state.__getitem__, resolve_data=resolve)
    items = [SimpleNamespace(index=index, type=WriteItemType.TENSOR) for index in state]
    plan = SimpleNamespace(storage_data=SimpleNamespace(prefix="__0_"), items=items)
    with pytest.raises(OSError):
        _Writer(tmp_path / folder).write_data(plan, planner)  # type: ignore[arg-type]
    assert taken == [1, 2]
