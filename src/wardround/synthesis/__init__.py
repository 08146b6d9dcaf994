"""Images from models: what the coordinator of a one-shot method makes because it has none."""
