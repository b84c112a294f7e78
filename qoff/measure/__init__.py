"""Rates of a model, samples of anything, the machine they were taken on, and comparing results."""
