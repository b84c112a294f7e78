"""torch modules whose weights are packed codes."""
