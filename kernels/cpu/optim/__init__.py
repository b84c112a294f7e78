"""Optimizers on a CPU: one pass over weights, gradients and moments."""
