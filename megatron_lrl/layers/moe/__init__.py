"""Mixtures of experts: the router."""
