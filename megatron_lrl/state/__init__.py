"""Resident state of each layer kind, and `advance`, the one step that grows it."""

from megatron_lrl.state.advance import advance
from megatron_lrl.state.sequence import SequenceState

__all__ = ["SequenceState", "advance"]
