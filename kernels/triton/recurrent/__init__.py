"""Gated DeltaNet on a GPU."""
