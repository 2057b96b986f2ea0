"""Routing recorded while sampling and used in replay; balance of experts."""
