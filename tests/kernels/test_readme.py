"""The examples of kernels/README.md run as they are written, in the interpreter without a GPU."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

README = Path(__file__).resolve().parents[2] / "kernels" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number):
    code = EXAMPLES[number]
    if not torch.cuda.is_available():
        code = code.replace('torch.device("cuda")', 'torch.device("cpu")')
    found = {}
    exec(compile(code, str(README), "exec"), found)
    for name in ("y", "out"):
        assert bool(torch.isfinite(found[name]).all())
