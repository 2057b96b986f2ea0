"""Prompts, rewards, advantages and losses; see README.md."""
