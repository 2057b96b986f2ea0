"""Hugging Face configuration -> Megatron-Core model."""
