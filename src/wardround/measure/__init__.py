"""Measures over predictions."""
