"""Benches: `python -m bench.<name>` prints a table and writes JSON, each beside its peer or limit.

Started from the checkout, Python searches it first, and `kernels/` would hide the PyPI package
`kernels`, which transformers looks for; so the checkout is searched last.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
if sys.path and Path(sys.path[0]).resolve() == _ROOT:
    sys.path.append(sys.path.pop(0))
