"""Other packages' 4-bit weights: each quantizes a float model by its own code, which is undone.

Run by the interpreter of an environment of their own (`python -m bench.peers quantizers`): the
first line of standard input is a JSON object with the name of a peer, a model's directory, the file
to write and the calibration text's token ids. The answer is the version of the package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP = 64  # columns that share a scale
STEPS = 200  # AutoRound's own default
# Peers: the package, and bits a weight with all that is stored.
PACKAGES = {
    "bitsandbytes NF4": ("bitsandbytes", 4.25),
    "HQQ": ("hqq", 4.5),
    "torchao int4": ("torchao", 4.5),
    "optimum-quanto qint4": ("optimum-quanto", 4.5),
    "AutoRound": ("auto-round", 4 + (16 + 4) / GROUP),
}


def nf4(w: Tensor) -> Tensor:
    """bitsandbytes' NF4, blocks of 64, their largest magnitudes in 16 bits."""
    functional: Any = import_module("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(w.contiguous(), blocksize=GROUP, quant_type="nf4")
    state.absmax = state.absmax.half().float()
    return functional.dequantize_4bit(codes, state).float()


def hqq(w: Tensor) -> Tensor:
    """The hqq package's optimizer, scales and zero points in 16 bits."""
    quantizer: Any = import_module("hqq.core.quantize").Quantizer
    codes, meta = quantizer.quantize(
        w.clone(), nbits=4, channel_wise=True, group_size=GROUP, optimize=True, round_zero=False,
        axis=1, bitpack=False, compute_dtype=torch.float32, device="cpu",
    )  # fmt: skip
    scale, zero = (meta[key].half().float() for key in ("scale", "zero"))
    return ((codes.float() - zero) * scale).reshape(w.shape)


def torchao(w: Tensor) -> Tensor:
    """What its int4 weight-only config does, whose packings need a GPU: bfloat16 scales and zeros,
    the zero point in floats, as torch's int4 matmul takes them.
    """
    ao: Any = import_module("torchao.quantization.quant_primitives")
    block, bounds = (1, GROUP), {"quant_min": 0, "quant_max": 15}
    half = w.bfloat16()
    scale, zero = ao._choose_qparams_affine_tinygemm(
        half, ao.MappingType.ASYMMETRIC, block, torch.int32, eps=1e-6,
        scale_dtype=torch.bfloat16, zero_point_dtype=torch.bfloat16, **bounds,
    )  # fmt: skip
    codes = ao._quantize_affine_tinygemm(half, block, scale, zero, torch.int32, **bounds)
    found = ao._dequantize_affine_tinygemm(codes, block, scale, zero, torch.int32, **bounds)
    return found.float()


def quanto(w: Tensor) -> Tensor:
    """optimum-quanto's qint4 with its optimizer of ranges."""
    package: Any = import_module("optimum.quanto")
    scale, shift = package.MaxOptimizer()(w, package.qint4, 0, GROUP)
    return package.quantize_weight(w, package.qint4, 0, scale, shift, GROUP).dequantize().float()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "bitsandbytes NF4": nf4, "HQQ": hqq, "torchao int4": torchao, "optimum-quanto qint4": quanto,
}  # fmt: skip


def auto_round(model: Any, tokenizer_of: str, ids: list[list[int]], steps: int) -> Any:
    """AutoRound on the calibration texts; its model has the dequantized weights."""
    rounding_of: Any = import_module("auto_round").AutoRound

    texts = [torch.tensor(text)[None] for text in ids]
    rounding = rounding_of(
        model, AutoTokenizer.from_pretrained(tokenizer_of), scheme="W4A16", bits=4,
        group_size=GROUP, sym=False, iters=steps, dataset=texts, seqlen=len(ids[0]),
        nsamples=len(ids), batch_size=2, device_map="cpu", enable_torch_compile=False, amp=False,
    )  # fmt: skip
    return rounding.quantize()[0]


@torch.no_grad()
def main() -> None:
    """Do what standard input asks for."""
    work = json.loads(sys.stdin.readline())
    model: Any = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    head = model.get_output_embeddings()
    if work["peer"] == "AutoRound":
        with torch.enable_grad():
            model = auto_round(model, work["model"], work["ids"], work["steps"])
    else:
        change = CHANGES[work["peer"]]
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.weight.copy_(change(module.weight.float()))
    found = {
        f"{name}.weight": module.weight.detach().float().contiguous()
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.dim() == 2
        and not isinstance(module, nn.Embedding)
        and not name.endswith("lm_head")
    }
    save_file(found, work["out"])
    print(json.dumps({"version": version(PACKAGES[work["peer"]][0])}))


if __name__ == "__main__":
    main()
