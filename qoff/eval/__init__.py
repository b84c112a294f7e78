"""Accuracy against compression: perplexity, divergence from a reference, sweeps, retrieval."""
