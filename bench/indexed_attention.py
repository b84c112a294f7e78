"""Attention to the tokens that an index chooses, beside attention to all, on the CPU.

Sizes of DeepSeek V3.2: 128 heads on latents of 512 + 64 channels, an index of 64 heads of 128, and
2,048 tokens of a packed cache that it chooses. `choose` scores all tokens and lists the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.harness import Report, arguments
from bench.sampling import interleaved, timed, torch_threads
from qoff.kernels.cpu import ops
from qoff.kernels.cpu.attention.appending import append
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import CachePass, KVCache, KVQuant
from qoff.kvcache.host.mixed import host_cache

INDEX = IndexShape(heads=64, dim=128, rope_dim=64, top=2048)
LATENTS = HeadShape(128, 1, 576, 192**-0.5, latent=512)
CONTEXTS = (4096, 8192, 16384, 32768)
ROWS = (1, 16)  # new tokens
WAYS = ("choose", "chosen", "all")


def begun(context: int, rows: int) -> tuple[KVCache, CachePass, Ragged]:
    """A cache, and a pass of new tokens behind random ones that are packed."""
    cache = host_cache((INDEX.keys, LATENTS), 1, KVQuant(4, 4))
    done = 0
    while done < context - rows:
        count = min(1024, context - rows - done)
        ragged = Ragged.of([count], [done])
        run = cache.begin(ragged)
        for layer, shape in enumerate((INDEX.keys, LATENTS)):
            opened = run.open(layer)
            assert isinstance(opened, LayerCache)
            append(torch.randn(count, shape.qkv_width), shape, opened, ragged)
            run.close(layer)
        run.end()
        done += count
    ragged = Ragged.of([rows], [done])
    return cache, cache.begin(ragged), ragged


def calls(run: CachePass, ragged: Ragged) -> dict[str, Callable[[], object]]:
    """What is timed: choosing, attention to what was chosen, attention to all."""
    index, latents = run.open(0), run.open(1)
    assert isinstance(index, LayerCache)
    assert isinstance(latents, LayerCache)
    qk = torch.randn(ragged.tokens, INDEX.width)
    weights, qkv = (
        torch.randn(ragged.tokens, INDEX.heads),
        torch.randn(ragged.tokens, LATENTS.qkv_width),
    )
    chosen = ops.choose(qk, weights, INDEX, index, ragged)
    attend = partial(ops.attention, qkv, LATENTS, latents, ragged)
    return {
        "choose": partial(ops.choose, qk, weights, INDEX, index, ragged, out=chosen),
        "chosen": partial(attend, chosen=chosen),
        "all": attend,
    }


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(__doc__, argv)
    result = Report(
        "indexed_attention",
        {"threads": torch.get_num_threads(), "quick": args.quick},
        "random queries, one layer, ms",
        ("tokens", "new", *WAYS, "all / (choose + chosen)"),
        unit="seconds",
    )
    contexts = CONTEXTS[:1] if args.quick else CONTEXTS
    with torch_threads(1):
        for rows in ROWS:
            for context in contexts:
                cache, run, ragged = begun(context, rows)
                timings = {name: timed(call) for name, call in calls(run, ragged).items()}
                found = interleaved(timings, 3 if args.quick else 7)
                run.abandon()
                del cache
                choose, chosen, everything = (found[way].median for way in WAYS)
                ratio = everything / (choose + chosen)
                name = f"{context} tokens, {rows} new"
                result.measured |= {f"{name}, {way}": found[way].summary() for way in WAYS}
                result.ratios[name] = ratio
                cells = (f"{1e3 * x:.2f}" for x in (choose, chosen, everything))
                result.rows.append((str(context), str(rows), *cells, f"{ratio:.2f}"))
    result.publish(args.out)


if __name__ == "__main__":
    main()
