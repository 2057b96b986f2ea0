"""Consistency of a configured model: rollout against replay, contracts against conventional."""
