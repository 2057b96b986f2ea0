"""Bytes and operations of a window, before launch."""
