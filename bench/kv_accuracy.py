"""What compressing the KV cache costs the demo model: perplexity, divergence, agreement.

The model runs in float32 in transformers; K and V of whole windows of a text are compressed and
unpacked before attention, so that every token attends to compressed tokens alone, itself and its
neighbours included: there is no recent window that would help. The second half of each window is
scored against the same model with K and V as they are, token by token. With `--layers`, one layer
at a time is compressed instead, which says where more bits would pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoTokenizer

from bench.demo import fetch_checkpoint, fetch_gguf
from bench.harness import Report, arguments
from bench.kv_scheme_list import DEFAULT, Rotary, schemes
from bench.kv_schemes import Keep, Scheme, exact
from qoff.errors import ArgumentError
from qoff.eval.models import open_float
from qoff.kernels.layout.kv_format import BLOCK_TOKENS

WINDOW = 1024  # tokens
_INTERFACE = "compressed_kv"

Seen = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # layer, q, k, v: k and v


@dataclass(frozen=True)
class Cost:
    """What one scheme costs, over all scored tokens."""

    loss: float  # nats a token above the plain model's
    error: float  # standard error of it, of paired differences
    kl: float  # mean divergence from the plain model's distribution, nats
    kl_99: float  # 99 % of the tokens have less
    top: float  # part of the tokens whose likeliest successor is the same
    kl_by_window: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Perplexity over that of the plain model."""
        return math.exp(self.loss)


class Judge:
    """A model that attends to what a scheme leaves of K and V, and windows of a text."""

    def __init__(self, windows: Tensor) -> None:
        """windows: int64 [n, WINDOW]."""
        self.windows = windows
        self._seen: Seen = _as_they_are
        AttentionInterface.register(_INTERFACE, self._attend)
        self.model = open_float(fetch_gguf())
        self.model.set_attn_implementation(_INTERFACE)
        self.plain: list[Tensor] = []  # float16, to have room
        self.losses: list[Tensor] = []
        for window in windows:
            found = self._log_probabilities(window)
            self.plain.append(found.half())
            self.losses.append(self._loss(found, window))

    def judge(self, keys: Keep, values: Keep) -> Cost:
        """Compress K and V of all layers."""
        more, divergence, same = [], [], []
        with self._seeing(lambda layer, _q, k, v: (keys(layer, k), values(layer, v))):
            for window, plain, loss in zip(self.windows, self.plain, self.losses, strict=True):
                found, before = self._log_probabilities(window), plain.float()
                more.append(self._loss(found, window) - loss)
                divergence.append((before.exp() * (before - found)).sum(-1))
                same.append(found.argmax(-1) == before.argmax(-1))
        all_more, kl = torch.cat(more), torch.cat(divergence)
        return Cost(
            loss=float(all_more.mean()),
            error=float(all_more.std() / all_more.numel() ** 0.5),
            kl=float(kl.mean()),
            kl_99=float(kl.quantile(0.99)),
            top=float(torch.cat(same).float().mean()),
            kl_by_window=tuple(float(window.mean()) for window in divergence),
        )

    def mean_queries(self, window: Tensor) -> dict[int, Tensor]:
        """The mean query of each KV head after RoPE, [kv_heads, D], by layer; window: [WINDOW]."""
        means = {}

        def note(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            means[layer] = q[0].unflatten(0, (k.shape[1], -1)).mean((1, 2))
            return k, v

        with self._seeing(note):
            self._log_probabilities(window)
        return means

    def rotary(self) -> Rotary:
        """cos and sin of all positions, [WINDOW, D / 2]."""
        module = self.model.model.rotary_emb
        cos, sin = module(torch.zeros(1), torch.arange(WINDOW)[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half], sin[0, :, :half]

    @contextmanager
    def _seeing(self, seen: Seen) -> Iterator[None]:
        self._seen = seen
        try:
            yield
        finally:
            self._seen = _as_they_are

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        k, v = self._seen(module.layer_idx, q, k, v)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    def _log_probabilities(self, window: Tensor) -> Tensor:
        """[WINDOW / 2, vocabulary]: for each token of the second half, given those before it."""
        kept = WINDOW // 2 + 1
        return self.model(window[None], logits_to_keep=kept).logits[0, :-1].log_softmax(-1)

    @staticmethod
    def _loss(found: Tensor, window: Tensor) -> Tensor:
        return -found.gather(-1, window[WINDOW // 2 :, None])[:, 0]


def _as_they_are(_layer: int, _q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k, v


def read_windows(text: str, count: int) -> Tensor:
    """Windows spread evenly over a text, int64 [count, WINDOW]; ArgumentError for a short one."""
    tokenizer = AutoTokenizer.from_pretrained(fetch_checkpoint())
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    if len(ids) < WINDOW * count:
        raise ArgumentError(
            f"a text of {len(ids)} tokens; {count} windows of {WINDOW} need {WINDOW * count}"
        )
    stride = (len(ids) - WINDOW) // max(1, count - 1)
    return torch.stack([ids[i * stride : i * stride + WINDOW] for i in range(count)])


def calibration() -> Tensor:
    """A window of Python's reference, int64 [WINDOW]: nothing like what is scored."""
    return read_windows("\n\n".join(topics[name] for name in sorted(topics)), 1)[0]


def add_rows(result: Report, judge: Judge, names: Sequence[str]) -> dict[str, Cost]:
    """Judge the schemes (all without names) into the report; returns their costs."""
    known = schemes(judge.mean_queries(calibration()), judge.rotary())
    unknown = sorted(set(names) - {scheme.name for scheme in known})
    if unknown:
        raise ArgumentError(f"no scheme is called {unknown[0]!r}; {[s.name for s in known]} are")
    costs = {}
    for scheme in known:
        if names and scheme.name not in names:
            continue
        cost = costs[scheme.name] = judge.judge(scheme.keys, scheme.values)
        result.rows.append(_row(scheme, cost))
        print(*result.rows[-1], flush=True)
        result.measured[scheme.name] = {"bits": scheme.bits, **asdict(cost)}
        result.ratios[scheme.name] = cost.ratio
    return costs


def _row(scheme: Scheme, cost: Cost) -> tuple[str, ...]:
    return (
        scheme.name, f"{scheme.bits:.2f}", f"{100 * (cost.ratio - 1):+.2f} %",
        f"{100 * cost.error:.2f}", f"{cost.kl:.5f}", f"{cost.kl_99:.4f}", f"{100 * cost.top:.2f} %",
    )  # fmt: skip


def by_layer(judge: Judge, scheme: Scheme) -> Mapping[int, tuple[Cost, Cost]]:
    """What K alone, and V alone, of each layer alone cost."""

    def only(keep: Keep, wanted: int) -> Keep:
        return lambda layer, x: keep(layer, x) if layer == wanted else x

    layers = range(judge.model.config.num_hidden_layers)
    return {
        layer: (
            judge.judge(only(scheme.keys, layer), exact),
            judge.judge(exact, only(scheme.values, layer)),
        )
        for layer in layers
    }


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__, argv, text=(Path, None, "a text file, prose of 10,000 words or more"),
        windows=(int, 12, f"windows of {WINDOW} tokens"), only=(str, "", "schemes, with ; between"),
        layers=(bool, False, "each layer alone, too"),
    )  # fmt: skip
    if args.text is None:
        raise SystemExit("kv_accuracy: --text FILE is missing: the text that is scored")
    windows = read_windows(args.text.read_text(), 1 if args.quick else args.windows)
    judge = Judge(windows)
    result = Report(
        "kv_accuracy",
        {"text": args.text.name, "windows": len(windows), "window": WINDOW, "block": BLOCK_TOKENS},
        "K and V compressed, against the same model with both in float32; second halves scored",
        ("scheme", "bits", "perplexity", "± %", "mean KL", "99 % KL", "same top token"),
    )
    add_rows(result, judge, [name for name in args.only.split(";") if name])
    if args.layers:
        (scheme,) = (s for s in schemes({}, judge.rotary()) if s.name == DEFAULT)
        for layer, (keys, values) in by_layer(judge, scheme).items():
            result.measured[f"layer {layer}"] = {"K": asdict(keys), "V": asdict(values)}
            result.notes.append(f"layer {layer}: KL of K {keys.kl:.6f}, of V {values.kl:.6f}")
    result.publish(args.out)


if __name__ == "__main__":
    main()
