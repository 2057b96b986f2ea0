"""Layer kinds, each a room; what stays resident of them, and `advance`, the one step that grows it."""
