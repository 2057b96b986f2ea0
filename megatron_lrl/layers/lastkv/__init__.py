"""LastKV attention: history is the last layer's keys and values, and chunk boundaries are part of the policy."""
