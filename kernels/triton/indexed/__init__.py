"""Attention to the tokens that an index of keys chooses, on a GPU: see `kernels.layout.index`."""
