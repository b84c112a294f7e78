"""KV caches in host memory: uncompressed, packed, and both by layer."""
