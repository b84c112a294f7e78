"""Attention to the tokens that an index of keys chooses: see `kernels.layout.index`."""
