"""Groups of a window: prompts, sampling, the journal."""
