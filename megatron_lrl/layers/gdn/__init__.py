"""Gated DeltaNet: the delta rule from a given state to the next one, and what feeds it."""
