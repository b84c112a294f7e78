"""`qoff convert`: what its options mean."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qoff.errors import QoffError
from qoff.quant import Format, QuantConfig
from qoff.quant.matrix import CALIBRATED

if TYPE_CHECKING:
    from torch import Tensor

    from qoff.eval.mixing.mixing import Mix

TOKENS = 512  # of a text to calibrate on
SOLVER_TEXTS, LOSS_TEXTS = 64, 8  # for the solver, and for what formats lose
_FORMAT = re.compile(r"(.+)=(\d+),(\d+)")


@dataclass(frozen=True)
class Target:
    """What formats are chosen for: a size in bits a weight, a loss in nats a token, or nothing."""

    bits: float | None = None
    loss: float | None = None

    @property
    def given(self) -> bool:
        return self.bits is not None or self.loss is not None

    def text(
        self, solver: str, weight: Iterable[str] | None, calibration: Path | None
    ) -> Path | None:
        """The text to calibrate on, by default the one of qoff; None if none is needed.

        Raises QoffError for options that exclude each other.
        """
        if self.bits is not None and self.loss is not None:
            raise QoffError("--target-bits and --max-kl both choose the formats; give one of them")
        if self.given and weight:
            raise QoffError("--weight and a target both choose formats; leave one of them out")
        wants = self.given or solver in CALIBRATED
        if calibration is not None and not wants:
            raise QoffError(
                "--calibration is for --target-bits, --max-kl and --solver gptq; "
                "give one of them, or leave it out"
            )
        if wants and calibration is None:
            from qoff.eval.texts import CALIBRATION_TEXT

            return CALIBRATION_TEXT
        return calibration


def formats_of(texts: Iterable[str]) -> dict[str, Format]:
    """Formats by pattern, from texts like "*.down_proj=8,64": bits and group size.

    Raises QoffError for another text, QuantizationError for a format that does not exist.
    """
    found = {}
    for text in texts:
        match = _FORMAT.fullmatch(text)
        if match is None:
            raise QoffError(
                f"--weight {text!r} is not NAME=BITS,GROUP; write one like '*.down_proj=8,64'"
            )
        found[match[1]] = Format(int(match[2]), int(match[3]))
    return found


def calibration_ids(source: Path, file: Path) -> Tensor:
    """Token ids of a text in UTF-8 by the tokenizer of a model, int64 [texts, 512], in order.

    64 pieces spread over a long text; a shorter one has fewer. Raises QoffError for a
    file without a whole piece, FormatError for a model without a tokenizer.
    """
    import torch

    from qoff.eval.perplexity.models import tokenizer_of

    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QoffError(f"{file}: is not UTF-8 text ({error.reason})") from error
    tokenizer = tokenizer_of(source)
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    pieces = len(ids) // TOKENS
    if not pieces:
        raise QoffError(
            f"{file}: has {len(ids)} tokens; calibration needs at least {TOKENS}, "
            f"better {SOLVER_TEXTS * TOKENS}"
        )
    kept = min(pieces, SOLVER_TEXTS)
    chosen = torch.arange(kept) * pieces // kept
    return ids[: pieces * TOKENS].view(pieces, TOKENS)[chosen]


def mixed(
    source: Path,
    ids: Tensor,
    quant: QuantConfig,
    target: Target,
    progress: Callable[[int, int], None],
) -> Mix:
    """Choose the formats of a model's matrices for a target, on some of the texts.

    Raises UnsupportedModelError for models that qoff has no decoder for, QuantizationError for
    weights that are quantized already.
    """
    from qoff.eval.mixing.mixing import mixed_for_bits, mixed_for_loss
    from qoff.eval.mixing.sensitivity import Sensitivities
    from qoff.models.convert.unconverted import Unconverted
    from qoff.models.sources import open_source

    model = Unconverted.of(open_source(source))
    step = max(1, len(ids) // LOSS_TEXTS)
    sensitivities = Sensitivities(model, ids[::step][:LOSS_TEXTS], quant)
    found = sensitivities.of(progress=progress)
    if target.bits is not None:
        return mixed_for_bits(sensitivities, found, target.bits)
    assert target.loss is not None
    return mixed_for_loss(sensitivities, found, target.loss)


def described(mix: Mix) -> dict[str, Any]:
    """The chosen formats, for JSON."""
    count = Counter(str(form) for form in mix.formats.values())
    return {
        "bits_per_weight": mix.bits_per_weight,
        "loss": mix.loss,
        "formats": dict(count.most_common()),
    }


def sentence(described: Mapping[str, Any]) -> str:
    """The chosen formats, as a sentence."""
    counts = ", ".join(f"{n} matrices of {form}" for form, n in described["formats"].items())
    return (
        f"{described['bits_per_weight']:.3f} bits a weight in layers ({counts}); KL divergence "
        f"{described['loss']:.4f} nats a token, measured on the calibration text"
    )
