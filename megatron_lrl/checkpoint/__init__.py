"""Hugging Face weights to and from Megatron-Core models and distributed checkpoints; see README.md."""
