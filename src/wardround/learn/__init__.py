"""Training, evaluation and prediction: the one loop that every method uses."""
