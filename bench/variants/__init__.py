"""The forms in which each Triton kernel is launched, compiled without a GPU by `bench.static`."""
