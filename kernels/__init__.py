"""The ops qoff computes with, on packed 4-bit and 8-bit weights.

Every op has one meaning, written down in `reference` (plain torch), and implementations that must
agree with it: `kernels.cpu` and, on a GPU, Triton. This package depends on torch, triton and numba
alone; importing it imports none of them. Modules:

- `qtensor`: `QTensor`, a quantized matrix: packed codes, scales and minima.
- `packing`: the layouts of codes and scales in memory, and the moves between them.
- `reference`: what each op means, in torch.
"""
