"""Low-rank adapters on a frozen base; see README.md."""
