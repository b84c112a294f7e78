"""Accuracy against compression: perplexity, divergence, sweeps, retrieval, tasks."""
