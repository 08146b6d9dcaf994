"""Networks as named stages and a head, by name."""
