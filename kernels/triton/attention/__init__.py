"""The packed KV cache on a GPU: append, pack, decode and prefill attention, merge."""
