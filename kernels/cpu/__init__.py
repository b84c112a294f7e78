"""The ops on the CPU, compiled by numba for the processor at hand."""
