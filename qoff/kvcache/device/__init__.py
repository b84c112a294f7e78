"""The packed KV cache on a GPU, and the movement of its blocks."""
