"""Norms, gates and rotary embeddings on a GPU, fused where that saves a pass over memory."""
