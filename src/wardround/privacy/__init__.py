"""Protection at the site: training, features and counts with noise that only the site knows."""
