"""Softmax attention: queries of new tokens over resident and live keys and values."""
