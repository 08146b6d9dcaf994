"""The run directory: events, checkpoints, results."""
