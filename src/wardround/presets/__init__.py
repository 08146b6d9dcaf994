"""Named sets of settings, one TOML file each."""
