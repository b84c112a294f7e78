"""Other packages' 4-bit weights, evaluated like ours: same model, same text, same windows.

Each quantizes and dequantizes the matrices of a float model by its own code, but for embedding and
head, and the model is evaluated with these. So accuracy is compared, not kernels. The packages are
bitsandbytes, hqq, torchao and optimum-quanto; those that are not installed are left out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Report, arguments
from qoff.errors import ArgumentError, QoffError
from qoff.eval.perplexity.metrics import summarize
from qoff.eval.perplexity.models import cached_reference, open_float, tokenizer_of
from qoff.eval.perplexity.scoring import Sample, evaluate
from qoff.eval.perplexity.subjects import TransformersSubject
from qoff.eval.perplexity.windows import cut
from qoff.eval.texts import encode, read_text
from qoff.hf.load import local_source
from qoff.quant import quantize
from qoff.quant.solvers import SOLVERS

_GROUP = 64  # columns that share a scale
Change = Callable[[Tensor], Tensor]  # a matrix float32 [N, K] to what it becomes


@dataclass(frozen=True)
class Peer:
    """A way to quantize matrices. bits: per weight, with 16-bit scales and zero points."""

    name: str
    package: str  # that has to be installed
    bits: float
    change: Change


def _nf4(w: Tensor) -> Tensor:
    """bitsandbytes' NF4, largest magnitudes of blocks in 16 bits."""
    functional: Any = import_module("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(w.contiguous(), blocksize=64, quant_type="nf4")
    state.absmax = state.absmax.half().float()
    return functional.dequantize_4bit(codes, state).float()


def _hqq(w: Tensor) -> Tensor:
    """The hqq package's optimizer, scales and zero points in 16 bits."""
    quantizer: Any = import_module("hqq.core.quantize").Quantizer
    codes, meta = quantizer.quantize(
        w.clone(), nbits=4, channel_wise=True, group_size=_GROUP, optimize=True, round_zero=False,
        axis=1, bitpack=False, compute_dtype=torch.float32, device="cpu",
    )  # fmt: skip
    scale, zero = (meta[key].half().float() for key in ("scale", "zero"))
    return ((codes.float() - zero) * scale).reshape(w.shape)


def _torchao(w: Tensor) -> Tensor:
    """What its int4 weight-only config does, whose packings need a GPU: bfloat16 scales and zeros,
    the zero point in floats, as torch's int4 matmul takes them.
    """
    ao: Any = import_module("torchao.quantization.quant_primitives")
    block, bounds = (1, _GROUP), {"quant_min": 0, "quant_max": 15}
    half = w.bfloat16()
    scale, zero = ao._choose_qparams_affine_tinygemm(
        half, ao.MappingType.ASYMMETRIC, block, torch.int32, eps=1e-6,
        scale_dtype=torch.bfloat16, zero_point_dtype=torch.bfloat16, **bounds,
    )  # fmt: skip
    codes = ao._quantize_affine_tinygemm(half, block, scale, zero, torch.int32, **bounds)
    found = ao._dequantize_affine_tinygemm(codes, block, scale, zero, torch.int32, **bounds)
    return found.float()


def _quanto(w: Tensor) -> Tensor:
    quanto: Any = import_module("optimum.quanto")
    scale, shift = quanto.MaxOptimizer()(w, quanto.qint4, 0, _GROUP)
    return quanto.quantize_weight(w, quanto.qint4, 0, scale, shift, _GROUP).dequantize().float()


def _ours(w: Tensor, solver: str) -> Tensor:
    return quantize(w, 4, _GROUP, solver).dequantize()


PEERS = (
    *(Peer(f"qoff {name}, group 64", "qoff", 4.5, partial(_ours, solver=name)) for name in SOLVERS),
    Peer("bitsandbytes NF4, block 64", "bitsandbytes", 4.25, _nf4),
    Peer("HQQ, group 64", "hqq", 4.5, _hqq),
    Peer("torchao int4, group 64", "torchao", 4.5, _torchao),
    Peer("optimum-quanto qint4, group 64", "optimum.quanto", 4.5, _quanto),
)


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that qoff packs with `bits`, by name: all but the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


@contextmanager
def changed(path: str | Path, peer: Peer) -> Iterator[TransformersSubject]:
    """A float model with its matrices changed by a peer, to be evaluated.

    Raises QoffError where the peer fails, ArgumentError where a matrix comes back with another
    shape or values that are not finite.
    """
    model = open_float(path)
    with torch.no_grad():
        for name, linear in linear_layers(model):
            try:
                found = peer.change(linear.weight.detach().float())
            except (RuntimeError, ValueError, ImportError, AttributeError, TypeError) as error:
                reason = " ".join(str(error).split())
                raise QoffError(f"{peer.name} cannot quantize {name}: {reason}") from error
            if found.shape != linear.weight.shape or not bool(found.isfinite().all()):
                raise ArgumentError(
                    f"{peer.name} returns no finite matrix of the same shape for {name}"
                )
            linear.weight.copy_(found)
    yield TransformersSubject(model, peer.name)
    del model
    gc.collect()


def available(peers: Sequence[Peer] = PEERS) -> tuple[list[Peer], list[str]]:
    """Those that are installed, and the packages of the others."""
    missing = [peer.package for peer in peers if not _installed(peer.package)]
    return [peer for peer in peers if peer.package not in missing], missing


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__, argv, model=(str, None, "a model in floats: a directory or hub id"),
        text=(Path, None, "the text that is scored; default: one that comes with qoff"),
        windows=(int, 12, "windows of 1024 tokens"),
    )  # fmt: skip
    if args.model is None:
        raise SystemExit("quantizers: --model MODEL is missing: a model in floats")
    source = local_source(args.model)
    tokenizer = tokenizer_of(source)
    ids = encode(tokenizer, read_text(args.text))
    windows = cut(len(ids), 1024, limit=1 if args.quick else args.windows)
    sample = Sample(ids, windows, tokenizer.eos_token_id)
    peers, missing = available()
    result = Report(
        "quantizers",
        {
            "model": source.name,
            "text": args.text.name if args.text else "",
            "windows": len(windows),
        },
        "4-bit weights, against the model's own",
        ("weights", "bits", "ratio", "mean KL", "99 % KL", "same top"),
        notes=[f"not installed: {name}" for name in dict.fromkeys(missing)],
    )
    with closing(cached_reference(source, sample, tokenizer)) as reference:
        for peer in peers:
            with changed(source, peer) as subject:
                summary = summarize(evaluate(subject, sample, reference))
            far = summary.divergence
            assert far is not None  # there is a reference
            parts = (str(far.perplexity_ratio), str(far.mean_kl), f"{far.kl_99:.4f}")
            result.rows.append((peer.name, f"{peer.bits:.2f}", *parts, f"{far.same_top.value:.2%}"))
            result.measured[peer.name] = {"bits": peer.bits, **summary.as_dict()}
            result.ratios[peer.name] = far.perplexity_ratio.value
    result.publish(args.out)


if __name__ == "__main__":
    main()
