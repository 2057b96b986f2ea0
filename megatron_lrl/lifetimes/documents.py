"""Documents: what stands in a prompt group's place when there is no prompt.

Next-token training replays whole documents, several of them packed into one micro-batch. Each is a branch that starts
at position 0, so the clock restarts where a document does and nothing leaks from one into the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_lrl.layers.sequence import SequenceState

if TYPE_CHECKING:
    from megatron_lrl.lifetimes.run import Run


class Documents:
    """A group without a prefix. Under the conventional contract a document is one graph, else it is swept by rounds."""

    conventional = True

    def __init__(self, run: Run) -> None:
        self.run, self.model = run, run.model

    @property
    def whole_graph(self) -> bool:
        """Whether a replay keeps one graph through everything it feeds."""
        return self.run.config.prefix.contract == "conventional"

    def fork(self, branches: int, log: bool = False) -> SequenceState:
        """An empty state of ``branches`` documents."""
        return self.run.new_state(branches, log=log)

    def feed(
        self, documents: Sequence[Sequence[int]]
    ) -> tuple[list[Sequence[int]], list[int], list[Sequence[int]]]:
        """What is fed of each document, the position whose output predicts its first scored token, what is scored."""
        return [ids[:-1] for ids in documents], [0] * len(documents), [ids[1:] for ids in documents]

    def sweep(self) -> None:
        """There is no prefix whose gradient is owed."""

    def close(self) -> None:
        """There is no prefix to free."""
