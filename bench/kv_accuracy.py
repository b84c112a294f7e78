"""What packing the KV cache costs a model: perplexity, divergence, agreement.

K and V of whole windows of a text are packed and unpacked before attention, so that every token
attends to packed tokens alone, itself and its neighbours included: no recent window helps. The
second half of each window is scored against the same model with K and V as they are, token by
token. `--layers` packs one layer at a time, which says where more bits would pay. `--window 64` has
the newest tokens unpacked, as in use. `--caches "4;4,2;for 3.5"` measures qoff's own caches in use
instead: bits as `--kv` has them, or those that `--kv-target-bits` chooses for a size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.demo import fetch_checkpoint
from bench.every_token import every_token
from bench.harness import Report, arguments
from bench.kv_schemes import DEFAULT, Scheme, schemes
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.eval.kv import kv_bytes_per_token
from qoff.eval.mixing.kv_bits import kv_for_bits
from qoff.eval.perplexity.metrics import Divergence, summarize
from qoff.eval.perplexity.models import PIECE_TOKENS
from qoff.eval.perplexity.reference import Reference
from qoff.eval.perplexity.scoring import Sample, evaluate, make_reference
from qoff.eval.perplexity.subjects import QoffSubject
from qoff.eval.perplexity.windows import Window
from qoff.eval.texts import encode, first_token, read_text
from qoff.hf.tokenizer import load_tokenizer
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kvcache import KVQuant
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec

WINDOW = 1024  # tokens


def spread_windows(total: int, count: int) -> list[Window]:
    """Windows spread evenly over a text, second halves scored; ArgumentError for a short one."""
    if total < WINDOW * count:
        raise ArgumentError(
            f"a text of {total} tokens; {count} windows of {WINDOW} need {WINDOW * count}"
        )
    stride = (total - WINDOW) // max(1, count - 1)
    starts = [i * stride for i in range(count)]
    return [Window(start, start + WINDOW, start + WINDOW // 2) for start in starts]


class Judge:
    """A checkpoint, and a text with the predictions that it makes with K and V as they are."""

    def __init__(
        self, checkpoint: Path, sample: Sample, folder: Path, window: int | None = None
    ) -> None:
        self._checkpoint, self._sample, self._window = checkpoint, sample, window
        self.layers = DecoderSpec.from_config(Checkpoint.open(checkpoint).config).num_layers
        with Runtime(checkpoint) as runtime:
            subject = QoffSubject(runtime, "as it is", None)
            self.reference: Reference = make_reference(subject, sample, folder / "reference")

    def judge(self, scheme: Scheme) -> Divergence:
        """What a scheme costs."""
        packed = every_token(self._checkpoint, scheme.round_trip, scheme.before_rope, self._window)
        with Runtime(self._checkpoint, instrumentation=packed) as runtime:
            subject = QoffSubject(runtime, scheme.name, None)
            found = summarize(evaluate(subject, self._sample, self.reference)).divergence
        assert found is not None
        return found

    def judge_cache(self, kv: KVQuant) -> Divergence:
        """What a cache costs whose newest tokens are not packed, read in pieces of 64 tokens."""
        with Runtime(self._checkpoint, kv=kv) as runtime:
            subject = QoffSubject(runtime, str(kv), PIECE_TOKENS)
            found = summarize(evaluate(subject, self._sample, self.reference)).divergence
        assert found is not None
        return found

    def cache(self, text: str) -> tuple[KVQuant, float]:
        """A cache and the bits of its packed values, from text like "4,2" or "for 3.5"."""
        target = text.removeprefix("for ")
        kv = KVQuant.of(text) if target == text else kv_for_bits(self._checkpoint, float(target))
        spec = DecoderSpec.from_config(Checkpoint.open(self._checkpoint).config)
        nbytes = kv_bytes_per_token(kv, spec)
        return kv, 8 * nbytes / (2 * spec.num_kv_heads * spec.head_dim * spec.num_layers)


def only_layer(scheme: Scheme, layer: int, place: int) -> Scheme:
    """A scheme that packs K (place 0) or V (1) of one layer alone."""

    def round_trip(k: Tensor, v: Tensor, here: int) -> tuple[Tensor, Tensor]:
        if here != layer:
            return k, v
        found = scheme.round_trip(k, v, here)
        return (found[0], v) if place == 0 else (k, found[1])

    return replace(scheme, round_trip=round_trip)


def chosen(names: str) -> list[Scheme]:
    """The schemes of these names, with ; between; all without any."""
    known = {scheme.name: scheme for scheme in schemes()}
    wanted = [name for name in names.split(";") if name]
    unknown = sorted(set(wanted) - known.keys())
    if unknown:
        raise ArgumentError(f"no scheme is called {unknown[0]!r}; {list(known)} are")
    return [known[name] for name in wanted] if wanted else list(known.values())


def add_rows(result: Report, judge: Judge, wanted: Sequence[Scheme]) -> None:
    """Judge schemes into the report."""
    for scheme in wanted:
        add_row(result, scheme.name, scheme.bits, judge.judge(scheme))


def add_caches(result: Report, judge: Judge, texts: Sequence[str]) -> None:
    """Judge caches into the report."""
    for text in texts:
        kv, bits = judge.cache(text)
        add_row(result, text, bits, judge.judge_cache(kv))
        measured = result.measured[text]
        measured["layers"] = [kv.bits(layer) for layer in range(judge.layers)]


def add_row(result: Report, name: str, bits: float, found: Divergence) -> None:
    """Add what something costs to the report, and print it."""
    ratio = found.perplexity_ratio
    row = (
        name, f"{bits:.2f}", f"{100 * (ratio.value - 1):+.2f} %",
        f"{100 * ratio.error:.2f}", f"{found.mean_kl.value:.5f}", f"{found.kl_99:.4f}",
        f"{100 * found.same_top.value:.2f} %",
    )  # fmt: skip
    result.rows.append(row)
    print(*row, flush=True)
    measured: dict[str, Any] = {"bits": bits, "ratio": ratio.value}
    measured |= {"ratio_error": ratio.error, "kl": found.mean_kl.value}
    measured |= {"kl_99": found.kl_99, "top": found.same_top.value}
    result.measured[name], result.ratios[name] = measured, ratio.value


def add_layers(result: Report, judge: Judge, scheme: Scheme) -> None:
    """What K alone, and V alone, of each layer alone cost."""
    for layer in range(judge.layers):
        keys, values = (judge.judge(only_layer(scheme, layer, i)).mean_kl.value for i in (0, 1))
        result.measured[f"layer {layer}"] = {"K": keys, "V": values}
        result.notes.append(f"layer {layer}: KL of K {keys:.6f}, of V {values:.6f}")


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__, argv, text=(Path, None, "a text file, prose of 10,000 words or more"),
        model=(Path, None, "a checkpoint that a native family runs; default: the demo's"),
        windows=(int, 12, f"windows of {WINDOW} tokens"), only=(str, "", "schemes, with ; between"),
        layers=(bool, False, "each layer alone, too"),
        window=(int, None, "newest tokens that are not packed; default: all are"),
        caches=(str, "", "qoff's own caches instead, with ; between"),
    )  # fmt: skip
    if args.text is None:
        raise SystemExit("kv_accuracy: --text FILE is missing: the text that is scored")
    wanted, checkpoint = chosen(args.only), args.model or fetch_checkpoint()
    tokenizer = load_tokenizer(checkpoint)
    ids, first = encode(tokenizer, read_text(args.text)), first_token(tokenizer)
    windows = spread_windows(len(ids), 1 if args.quick else args.windows)
    result = Report(
        "kv_accuracy",
        {
            "model": checkpoint.name,
            "text": args.text.name,
            "windows": len(windows),
            "window": WINDOW,
            "block": BLOCK_TOKENS,
            "unpacked": args.window,
        },
        "K and V packed, against the same model with both in float32; second halves scored",
        ("scheme", "bits", "perplexity", "± %", "mean KL", "99 % KL", "same top token"),
    )
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(checkpoint, Sample(ids, windows, first=first), Path(folder), args.window)
        with closing(judge.reference):
            if args.caches:
                add_caches(result, judge, args.caches.split(";"))
            else:
                add_rows(result, judge, wanted)
            if args.layers:
                add_layers(result, judge, chosen(DEFAULT)[0])
    result.publish(args.out)


if __name__ == "__main__":
    main()
