"""Where images come from and how they become sites."""
