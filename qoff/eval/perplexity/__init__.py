"""Perplexity of a text, and divergence from a reference model."""
