"""Accuracy against compression: what a model still knows when weights and cache are packed."""
