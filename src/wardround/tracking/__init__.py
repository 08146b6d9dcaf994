"""Runs in other people's tools, TensorBoard and MLflow: one way, from the record to them."""
