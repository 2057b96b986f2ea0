"""Independent answers: nothing in this package imports megatron_lrl."""
