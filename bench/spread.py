"""Writes the demo model with its weights moved off the 4-bit grid that they lie on.

    python -m bench.spread FOLDER
    python -m bench.spread FOLDER --gguf FILE
    qoff eval FOLDER --sweep --grid "bits=4 group=64 solver=rtn,mse,hqq,gptq kv=float"
    python -m bench.quant_peers

The demo model comes from a GGUF file of 4 bits in groups of 32. Each weight of its layers is moved
by a random part of a step of that grid, up to half of one, so that no format has the grid for
itself. The weights of another GGUF file are moved by as much, whatever their types.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.demo import fetch_float, save_float
from qoff.eval.perplexity.models import open_float, tokenizer_of
from qoff.quant import quantize


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that qoff packs with `bits`, by name: all but the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def spread(w: Tensor, random: torch.Generator) -> Tensor:
    """A matrix [N, K] moved by up to half a step of 4 bits in groups of 32."""
    form = quantize(w, 4, 32, "rtn", scale_dtype=torch.float16)
    step = form.scale_min[..., 0].T.float().repeat_interleave(32, 1)
    return w + (torch.rand(w.shape, generator=random) - 0.5) * step


@torch.no_grad()
def write(source: Path, out: Path) -> None:
    """Write a float model, a directory with safetensors, with its linear layers' weights moved.

    source: such a directory, or a GGUF file.
    """
    model, random = open_float(source), torch.Generator().manual_seed(0)
    for _, linear in linear_layers(model):
        linear.weight.copy_(spread(linear.weight, random))
    if source.is_dir():
        shutil.copytree(source, out)
    else:
        tokenizer_of(source).save_pretrained(out)
    save_float(model, out)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to create")
    parser.add_argument("--gguf", type=Path, help="file of another model than the demo's")
    given = parser.parse_args(argv)
    write(given.gguf or fetch_float(), given.folder)


if __name__ == "__main__":
    main()
