"""Forms of the KV cache that a model is evaluated with."""
