"""A folder of runs as pages on this machine: a list, a comparison, and how a study that is running gets on."""
