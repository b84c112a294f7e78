"""Bits of K and V in each layer, for a size of the KV cache: by what few bits cost each layer.

The cost of 2 bits is measured for K and for V of a few neighbouring layers at a time, all else at 8
bits: the divergence of the predicted tokens, in nats, from those with 8 bits everywhere. Many
caches go through a layer before the next is read. What 3 and 4 bits cost is measured for K, and for
V, of all layers together; a layer's part of it is its part of the cost of 2 bits. Losses are added.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import KV_SENSITIVITY_FILE as FILE
from qoff.errors import (
    ArgumentError,
    BudgetError,
    FormatError,
    QoffError,
    UnsupportedModelError,
)
from qoff.eval.perplexity.models import PIECE_TOKENS, model_stamps, open_runtime
from qoff.eval.perplexity.subjects import Batch, read_together
from qoff.eval.texts import CALIBRATION_TEXT, begun, digest, encode, read_text
from qoff.hf.checkpoints import find_checkpoint
from qoff.hf.device import device_for
from qoff.hf.tokenizer import load_tokenizer
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kvcache import KVQuant
from qoff.models.modules.cache import ModuleCache
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime
from qoff.schema import json_text, read_object, replace_text

from .mixing import choose

if TYPE_CHECKING:
    from qoff.quant import QuantConfig

MOST = 8  # bits of what is compared with
_FEWEST, _BETWEEN = 2, (3, 4)
_TOKENS = 512  # of a text, whose second half is scored
_GROUPS = 16  # of neighbouring layers, at most
_TOGETHER = 8  # caches that go through a layer together
_VERSION = 2
_REFERENCE = KVQuant(MOST, MOST, window=0)
_Losses = tuple[Mapping[int, float], ...]  # of each layer, nats a token by bits
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KVSensitivity:
    """What K and V of each layer lose by their bits.

    shapes: head size and KV heads of each layer. seconds: that measuring it took.
    """

    shapes: tuple[tuple[int, int], ...]
    keys: _Losses
    values: _Losses
    made_of: str = ""  # digest of the checkpoint's files
    seconds: float = 0.0
    version: int = _VERSION

    @classmethod
    def read(cls, checkpoint: Path) -> Self | None:
        """What is kept with a checkpoint; None without, and for one that has changed since."""
        try:
            found = read_object(checkpoint / FILE, "remove it")
            losses = {name: tuple(map(_numbers, found[name])) for name in ("keys", "values")}
            shapes = tuple((int(dim), int(heads)) for dim, heads in found["shapes"])
            kept = cls(**{**found, **losses, "shapes": shapes})
        except (FormatError, KeyError, TypeError, ValueError, AttributeError):
            return None
        current = digest(model_stamps(checkpoint))
        return kept if (kept.version, kept.made_of) == (_VERSION, current) else None

    def write(self, checkpoint: Path) -> None:
        """Keep it with a checkpoint; where its folder cannot be written, say so."""
        try:
            replace_text(checkpoint / FILE, json_text(asdict(self)))
        except OSError as error:
            logger.warning("what bits of the KV cache cost is measured again next time: %s", error)


def kv_for_bits(
    model: str | PathLike[str],
    bits: float,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    slots: int = 2,
    activation_bits: int = 16,
    quant: QuantConfig | None = None,
    cache_dir: str | PathLike[str] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> KVQuant:
    """Bits of K and V in each layer that lose least, with at most `bits` a value of the cache.

    Scales and minima are included; tokens of the window, which are not packed, are not. What layers
    lose is measured where the checkpoint does not have it, and kept in its folder. tell: progress
    of the measurement. The other arguments are those of `qoff.load`. Raises ArgumentError for fewer
    bits than 2 for all take, UnsupportedModelError for a model with recurrent states, QoffError
    where predictions are no finite numbers, and the errors of `qoff.load`.
    """
    _check_bits(bits)
    where = device_for(device)
    checkpoint = find_checkpoint(
        model,
        quant=quant,
        cache_dir=cache_dir,
        revision=revision,
        device=where,
        trust_remote_code=trust_remote_code,
    )
    found = KVSensitivity.read(checkpoint)
    if found is None:
        found = _measured(
            checkpoint,
            tell,
            device=where,
            dtype=dtype,
            device_memory=device_memory,
            host_memory=host_memory,
            max_memory=max_memory,
            slots=slots,
            activation_bits=activation_bits,
            trust_remote_code=trust_remote_code,
        )
        found.write(checkpoint)
    return chosen(found, bits)


def _measured(
    checkpoint: Path, tell: Callable[[int, int], None] | None, **options: Any
) -> KVSensitivity:
    text = _text(checkpoint, options["trust_remote_code"])
    for together in (_TOGETHER, 1):
        fixed = {"kv": _REFERENCE, "length": len(text)}
        try:
            opened = open_runtime(checkpoint, **{**options, **fixed, "batch_size": 1 + together})
        except BudgetError as error:
            if together == 1:
                raise BudgetError(
                    f"measuring what bits of the KV cache cost: {error}; measure once without a "
                    "bound of memory"
                ) from error
            continue
        with opened as runtime:
            return measured(runtime, text, digest(model_stamps(checkpoint)), together, tell)
    raise AssertionError


def measured(
    runtime: Runtime,
    text: Tensor,
    made_of: str = "",
    together: int = _TOGETHER,
    tell: Callable[[int, int], None] | None = None,
) -> KVSensitivity:
    """What K and V of each layer lose. text: int64 [tokens]. together: caches at a time.

    runtime: with a packed cache. Raises UnsupportedModelError for a model with recurrent states,
    QoffError for predictions that are no finite numbers.
    """
    start = time.perf_counter()
    decoder = runtime.decoder
    cache = runtime.new_cache(1)
    if isinstance(cache, ModuleCache) and cache.recurrent:
        raise UnsupportedModelError(
            "what bits of the KV cache cost cannot be measured: this model has recurrent states "
            "and reads a text in one pass; give bits yourself, like --kv 4,3"
        )
    packed = decoder.head_shapes if isinstance(decoder, Decoder) else decoder.packed_shapes.values()
    if any(shape.latent for shape in packed):
        raise UnsupportedModelError(
            "values of this model are channels of its keys, and have their bits; give bits "
            "yourself, like --kv 4"
        )
    shapes = [(shape.head_dim, shape.kv_heads) for shape in packed]
    count, layers = min(_GROUPS, len(shapes)), len(shapes)
    groups = [range(i * layers // count, (i + 1) * layers // count) for i in range(count)]
    wanted = [KVQuant(*_pair(place, bits), window=0) for place in (0, 1) for bits in _BETWEEN]
    for pair in (_pair(0, _FEWEST), _pair(1, _FEWEST)):
        wanted += [replace(_REFERENCE, layers=dict.fromkeys(group, pair)) for group in groups]
    losses: list[float] = []
    for begin in range(0, len(wanted), together):
        losses += _losses(runtime, text, wanted[begin : begin + together])
        if tell is not None:
            tell(len(losses), len(wanted))
    left, found = iter(losses), list[_Losses]()
    wholes = [{bits: next(left) for bits in _BETWEEN} for _ in (0, 1)]
    for whole in wholes:
        alone = [next(left) for _ in groups]
        by_group = (_by_bits(loss, sum(alone), whole) for loss in alone)
        of_layer = zip(groups, by_group, strict=True)
        found.append(
            tuple(
                {bits: loss / len(group) for bits, loss in by_bits.items()}
                for group, by_bits in of_layer
                for _ in group
            )
        )
    seconds = time.perf_counter() - start
    keys, values = found
    return KVSensitivity(tuple(shapes), keys, values, made_of, seconds)


def chosen(found: KVSensitivity, bits: float) -> KVQuant:
    """The bits of least loss for a size. Raises ArgumentError where 2 bits for all are too many."""
    _check_bits(bits)
    options, losses, sizes, values = [], [], [], 0
    for (head_dim, kv_heads), *both in zip(found.shapes, found.keys, found.values, strict=True):
        values += 2 * kv_heads * head_dim * BLOCK_TOKENS
        for place, by_bits in enumerate(both):
            forms = [KVFormat(head_dim, *_pair(place, bits)) for bits in by_bits]
            parts = [(form.v_codes, form.nbytes - form.v_codes)[place] for form in forms]
            options.append(list(by_bits))
            losses.append(list(by_bits.values()))
            sizes.append([kv_heads * part for part in parts])
    picked = choose(losses, sizes, bits * values / 8)
    if picked is None:
        least = 8 * sum(map(min, sizes)) / values
        raise ArgumentError(
            f"{bits:g} bits a value of the KV cache are too few; {_FEWEST} bits for all take "
            f"{least:.3g}, scales and minima included"
        )
    most = 8 * sum(map(max, sizes)) / values
    if bits > most:
        logger.warning(
            "%g bits a value of the KV cache are more than it can take; %d bits for all take %.3g, "
            "scales and minima included",
            bits,
            MOST,
            most,
        )
    each = [option[i] for option, i in zip(options, picked, strict=True)]
    pairs = list(zip(each[::2], each[1::2], strict=True))
    ((usual, _),) = Counter(pairs).most_common(1)
    return KVQuant(*usual, layers={i: pair for i, pair in enumerate(pairs) if pair != usual})


def _losses(runtime: Runtime, text: Tensor, some: Sequence[KVQuant]) -> list[float]:
    """The mean divergence from a cache of 8 bits, nats a token, of each cache."""
    forms, place = [_REFERENCE, *some], len(text) // 2
    caches = [runtime.decoder.new_cache(1, len(text), form) for form in forms]
    batches = [Batch([text[:-1]], [place], cache) for cache in caches]
    truth, totals, count = torch.empty(0), [0.0] * len(forms), 0
    for number, found in read_together(runtime, batches, PIECE_TOKENS):
        logs = found.logits.float().log_softmax(-1)
        if number == 0:
            truth, count = logs, count + len(logs)
        totals[number] += float((truth.exp() * (truth - logs)).sum())
    for form, total in zip(forms, totals, strict=True):
        if not math.isfinite(total):
            others = f", {form.layers[min(form.layers)]} in {[*form.layers]}" if form.layers else ""
            raise QoffError(
                f"with a KV cache of {form.k_bits} and {form.v_bits} bits{others}, predictions are "
                "no finite numbers; what bits cost is not known"
            )
    return [max(0.0, total / count) for total in totals[1:]]


def _check_bits(bits: float) -> None:
    if not 0 < bits < math.inf:
        raise ArgumentError(
            f"{bits:g} bits a value of the KV cache; use a number above 0, like 3.5"
        )


def _pair(place: int, bits: int) -> tuple[int, int]:
    """Bits of K and V where one of them, K for place 0, has fewer."""
    return (bits, MOST) if place == 0 else (MOST, bits)


def _by_bits(loss: float, total: float, whole: Mapping[int, float]) -> dict[int, float]:
    """What a layer loses by its bits, from its loss with the fewest and all layers' with more."""
    part = loss / total if total > 0 else 0.0
    return {_FEWEST: loss, **{bits: part * more for bits, more in whole.items()}, MOST: 0.0}


def _text(checkpoint: Path, trust_remote_code: bool) -> Tensor:
    """Tokens from the middle of the text to calibrate on, behind what comes before each text."""
    config = Checkpoint.open(checkpoint).config
    limit = (config.get("text_config") or config).get("max_position_embeddings")
    tokenizer = load_tokenizer(checkpoint, trust_remote_code)
    ids = encode(tokenizer, read_text(CALIBRATION_TEXT))
    return begun(ids[len(ids) // 2 :][: min(_TOKENS, limit or _TOKENS)], tokenizer)


def _numbers(losses: Mapping[str, float]) -> dict[int, float]:
    return {int(bits): float(loss) for bits, loss in losses.items()}
