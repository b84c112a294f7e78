"""How CPU kernels are compiled and run: vector instructions, numba's cache, the thread pool."""
