"""Run > UpdateWindow > PromptGroup > Replay: four nested lifetimes, each a context manager."""
