"""Choosing tokens from logits on the CPU."""
