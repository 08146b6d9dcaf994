"""Federated learning for hospitals."""

__version__ = "0.1.0"
