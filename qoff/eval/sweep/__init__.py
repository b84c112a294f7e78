"""A grid of settings, each evaluated on the same text."""
