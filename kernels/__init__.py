"""The ops qoff computes with, on packed weights of 2 to 8 bits; see README.md in this folder.

Every op has one meaning, written down in `reference` (plain torch), and implementations that must
agree with it: `kernels.cpu` and, on a GPU, `kernels.triton`. This package depends on torch, triton
and numba alone; importing it imports none of them.
"""
