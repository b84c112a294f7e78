"""Gated DeltaNet on the CPU."""
