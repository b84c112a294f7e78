"""Decode attention over the best blocks only: time against dense attention, and what it costs.

Each case reads a pool far larger than the caches. With `--model`, also the negative log-likelihood
of prose by the demo model, with a 4-bit cache of 1,024 to 4,096 tokens: a prompt in one pass, the
rest token by token, with one prompt's cache for all fractions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.demo import fetch_checkpoint
from bench.harness import Report, arguments
from bench.sampling import interleaved, timed, torch_threads
from qoff.eval.texts import encode, read_text
from qoff.hf.tokenizer import load_tokenizer
from qoff.kernels.cpu.packed_attention.attention import packed_attention
from qoff.kernels.cpu.packed_attention.select import select_blocks
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache.host.packed import PackedCache
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.caches import head_shapes
from qoff.models.runtime import Runtime

KV_HEADS = 8
POOL_BYTES = 1 << 30  # at least, so that it is read from memory each time
DENSE, CHOICE = "dense", "choice alone"
TOPS = (0.25, 0.1)
MODEL_TOPS = (1.0, 0.9, 0.75, 0.6, 0.5, 0.25, 0.1)
CONTEXTS = (1024, 2048, 4096)  # tokens, the last NEW of them one by one
NEW = 512
SINKS = (0, 64)


@dataclass(frozen=True)
class Shape:
    """One sequence of `context` tokens; `group` query heads to each of 8 KV heads."""

    context: int
    head_dim: int
    group: int

    @property
    def name(self) -> str:
        return f"{self.context}, D {self.head_dim}, GQA {self.group}"


SHAPES = tuple(Shape(context, 128, group) for context in (16384, 131072) for group in (1, 4))
QUICK_SHAPES = (Shape(1024, 64, 3),)


def parts(shape: Shape, least_bytes: int) -> list[PackedTokens]:
    """Random blocks: alternatives that together have `least_bytes`."""
    form, blocks = KVFormat(shape.head_dim), shape.context // BLOCK_TOKENS
    copies = 1 + least_bytes // (blocks * KV_HEADS * form.nbytes)
    pool = torch.randint(256, (copies * blocks, KV_HEADS, form.nbytes), dtype=torch.uint8)
    _, k_scale, k_minimum, _, v_scale, v_minimum = form.views(pool)
    for scale, minimum in ((k_scale, k_minimum), (v_scale, v_minimum)):
        scale.copy_(0.1 + 0.2 * torch.rand(scale.shape))
        minimum.copy_(-7.5 * scale.float())
    ragged = Ragged.of([1], [shape.context])
    order = torch.randperm(copies * blocks).int().view(copies, 1, blocks)
    return [
        PackedTokens(form, pool, BlockTable(table.contiguous(), [shape.context], ragged))
        for table in order
    ]


def calls(shape: Shape, least_bytes: int) -> dict[str, Callable[[], object]]:
    """Dense attention, each fraction, and the choice of blocks alone; each takes other blocks."""
    heads, scale = KV_HEADS * shape.group, shape.head_dim**-0.5
    q = torch.randn(1, heads * shape.head_dim)
    turns = cycle(parts(shape, least_bytes))

    def attend(top: float) -> Tensor:
        part = next(turns)
        (chosen,) = select_blocks(q, heads, (part,), top)
        return packed_attention(q, heads, part, scale=scale, chosen=chosen)[0]

    return {
        DENSE: lambda: packed_attention(q, heads, next(turns), scale=scale),
        **{f"top {top}": partial(attend, top) for top in TOPS},
        CHOICE: lambda: select_blocks(q, heads, (next(turns),), min(TOPS)),
    }


def add_case(result: Report, shape: Shape, quick: bool) -> None:
    """Measure one shape into the report."""
    ways = calls(shape, (1 << 20) if quick else POOL_BYTES)
    least_s = 0.001 if quick else 0.05
    found = interleaved(
        {name: timed(way, least_s) for name, way in ways.items()}, 2 if quick else 7
    )
    dense = found[DENSE].median
    ratios = {f"top {top}": dense / found[f"top {top}"].median for top in TOPS}
    share = found[CHOICE].median / dense
    result.rows.append(
        (shape.name, *(f"{found[name].median * 1e3:.3f}" for name in ways),
         *(f"{ratio:.1f}" for ratio in ratios.values()), f"{share:.0%}",
         f"{found[DENSE].spread:.0%}")
    )  # fmt: skip
    result.measured[shape.name] = {name: samples.summary() for name, samples in found.items()}
    result.ratios[shape.name] = {**ratios, CHOICE: share}


def prose(checkpoint: Path, tokens: int, count: int) -> Tensor:
    """Texts, int64 [count, tokens], of the one that `qoff eval` reads."""
    ids = encode(load_tokenizer(checkpoint), read_text())
    return torch.stack(ids.split(tokens)[:count])


def _prompt_cache(runtime: Runtime, sinks: int, ids: Tensor) -> PackedCache:
    """A cache that has read the prompts, int64 [texts, tokens]."""
    shapes = head_shapes(runtime.spec)
    forms = [KVFormat(shape.head_dim) for shape in shapes]
    cache = PackedCache(shapes, forms, len(ids), window=64, sinks=sinks)
    ragged = Ragged.of([ids.shape[1]] * len(ids), [0] * len(ids))
    runtime.forward(ForwardPass(ids.flatten(), ragged, cache, ragged.last_rows))
    return cache


def _losses(runtime: Runtime, cache: PackedCache, ids: Tensor) -> Tensor:
    """Negative log-likelihoods [texts, new - 1] of ids[:, 1:], each token a pass of its own."""
    found = []
    for now, following in zip(ids.T[:-1], ids.T[1:], strict=True):
        ragged = Ragged.of([1] * len(ids), list(cache.lengths))
        logits = runtime.forward(ForwardPass(now.contiguous(), ragged, cache, ragged.last_rows))
        found.append(cross_entropy(logits, following, reduction="none"))
    return torch.stack(found, 1)


def likelihood(prompt: int, new: int, texts: int) -> dict[str, dict[str, Any]]:
    """Mean loss by unpacked oldest tokens and fraction, what it adds to dense's, and the error."""
    checkpoint = fetch_checkpoint()
    runtime = Runtime(checkpoint)
    ids = prose(checkpoint, prompt + new, texts)
    out = {}
    for sinks in SINKS:
        base, dense = _prompt_cache(runtime, sinks, ids[:, :prompt]), None
        for top in MODEL_TOPS:
            cache = copy.deepcopy(base)
            cache.attention_top = top
            losses = _losses(runtime, cache, ids[:, prompt:])
            dense = losses if dense is None else dense
            more = losses - dense
            out[f"{sinks} sinks, top {top}"] = {
                "nll": float(losses.mean()),
                "more": float(more.mean()),
                "error": float(more.std() / more.numel() ** 0.5),
                "by_text": losses.mean(1).tolist(),
            }
    runtime.close()
    return out


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(__doc__, argv, model=(bool, False, "what it costs the demo model, too"))
    names = (DENSE, *(f"top {top}" for top in TOPS), CHOICE)
    result = Report(
        "sparse_attention",
        {"kv_heads": KV_HEADS, "quick": args.quick, "form": "4-bit K per channel, 4-bit V"},
        "decode attention over 4-bit blocks, 8 KV heads, one sequence; / dense: times as fast",
        ("context", *(f"{name}, ms" for name in names), *(f"{top} / dense" for top in TOPS),
         "choice / dense", "spread"),
        unit="s",
    )  # fmt: skip
    for shape in QUICK_SHAPES if args.quick else SHAPES:
        add_case(result, shape, args.quick)
    for context in ((200,) if args.quick else CONTEXTS) if args.model else ():
        new, texts = (8, 1) if args.quick else (NEW, 4)
        with torch_threads(1):
            found = likelihood(context - new, new, texts)
        result.measured[f"likelihood, {context}"] = {"new": new, "texts": texts, **found}
        for name, loss in found.items():
            result.notes.append(
                f"{context} tokens, {name}: NLL {loss['nll']:.4f}, "
                f"{loss['more']:+.4f} ± {loss['error']:.4f}"
            )
            print(result.notes[-1], flush=True)
    result.publish(args.out)


if __name__ == "__main__":
    main()
