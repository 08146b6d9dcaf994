"""The papers' tables and figures as data, and the harness that runs them."""
