"""Starts worlds of ranks for tests: `from harness import World, WORLDS, run_world`."""

from harness.spawn import RankFailure, run_world
from harness.worlds import ONE, WORLDS, World, of_size

__all__ = ["ONE", "WORLDS", "RankFailure", "World", "of_size", "run_world"]
