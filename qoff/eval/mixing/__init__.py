"""Formats for the matrices of a model: what each costs, and which to take."""
