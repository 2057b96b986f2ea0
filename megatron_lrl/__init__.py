"""megatron_lrl: reinforcement learning of large models on very long prompts, on Megatron-Core."""

__version__ = "0.1.0"
