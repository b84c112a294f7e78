"""`qoff convert`: formats for a target, then the conversion."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qoff.checkpoint import Checkpoint, check_apart, check_place
from qoff.errors import ArgumentError, FormatError, QoffError
from qoff.eval.texts import CALIBRATION_TEXT, begun, encode, read_text
from qoff.hf.checkpoints import local_source
from qoff.hf.plugin.config import IMPORTED
from qoff.kernels.layout.packing import BITS
from qoff.models.convert.convert import convert, modules_source
from qoff.models.convert.loss import LossProbe
from qoff.models.convert.unconverted import Unconverted
from qoff.models.sources import open_source
from qoff.quant import Format, QuantConfig
from qoff.quant.matrix import CALIBRATED
from qoff.units import counted

from .command import named
from .options import ConversionOptions
from .output import progress_bar

TOKENS = 512  # of a text to calibrate on
_PLANNED = ("bits", "group_size", "solver", "target_bits", "max_kl", "weight")
_MUCH = 0.05  # nats a token
_LESS_PER_BIT = 3.0  # at least, by which a loss is divided with each bit more
_TEXTS = 24  # of which a third is for what formats lose, and the others for the solver
_EXCERPT = 1 << 13  # characters that have a piece of tokens
logger = logging.getLogger(__name__)
_FORMAT = re.compile(r"(.+)=(\d+),(\d+)")


@dataclass(frozen=True)
class Target:
    """What formats are chosen for: a size in bits a weight, a loss in nats a token, or nothing.

    calibration: the text that was named for it, or for the solver. tokens: for the solver.
    """

    bits: float | None = None
    loss: float | None = None
    calibration: Path | None = None
    tokens: int | None = None

    @property
    def given(self) -> bool:
        return self.bits is not None or self.loss is not None

    @property
    def texts(self) -> int:
        """How many pieces of a text are read, so that `tokens` are the solver's."""
        return _TEXTS if self.tokens is None else math.ceil(math.ceil(self.tokens / TOKENS) * 1.5)

    def text(self, quant: QuantConfig) -> Path | None:
        """The text to calibrate on, by default the one of qoff; None if none is needed.

        Raises QoffError for numbers that are no target, and options that exclude each other.
        """
        if self.bits is not None and self.loss is not None:
            raise QoffError("--target-bits and --max-kl both choose the formats; give one of them")
        for option, value in (("--target-bits", self.bits), ("--max-kl", self.loss)):
            if value is not None and not 0 < value < math.inf:
                raise ArgumentError(f"{option} is {value:g}; use a number above 0")
        if self.given and quant.weights:
            raise QoffError("--weight and a target both choose formats; leave one of them out")
        wants = self.given or quant.solver in CALIBRATED
        told = {"--calibration": self.calibration, "--calibration-tokens": self.tokens}
        for option, said in told.items():
            if said is not None and not wants:
                raise QoffError(
                    f"{option} is for --target-bits, --max-kl and --solver gptq; "
                    "give one of them, or leave it out"
                )
        return self.calibration or (CALIBRATION_TEXT if wants else None)


def planned(
    context: typer.Context, plan: Path, weights: ConversionOptions
) -> tuple[ConversionOptions, float | None]:
    """What a saved plan says of weights: these options, and `--target-bits`.

    Raises ArgumentError for options that say it, too, FormatError for a plan that says nothing.
    """
    from qoff.plan.saved import read_weights

    for option in named(context, _PLANNED).values():
        raise ArgumentError(f"--plan has the bits of the weights; leave out {option}")
    form = read_weights(plan)
    said = replace(weights, bits=form.bits, group_size=form.group_size, solver=form.solver)
    return said, form.target_bits


def run(
    source: str,
    out: Path,
    target: Target,
    quant: QuantConfig,
    *,
    for_: str,
    trust_remote_code: bool,
    quiet: bool,
    measured: bool,
    automatic: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Convert a model, with formats chosen for a target; returns what was made, for JSON.

    measured: also what it loses, "kl" with its error, where that can be. automatic: nobody asked
    for the solver, so one without calibration will do where there is none.
    """
    if for_ not in ("any", "cpu"):
        raise QoffError(f"--for is 'any' or 'cpu', not {for_!r}")
    text = target.text(quant)
    check_apart(out, source)
    check_place(out, overwrite)  # before what takes minutes
    path = local_source(source, trust_remote_code)
    _check_model(path)  # what is none needs neither calibration nor a loss
    try:
        ids = None if text is None else calibration_ids(path, text, trust_remote_code, target.texts)
    except FormatError as error:
        if target.given or not automatic:
            raise
        logger.warning("converting with hqq, without calibration: %s", error)
        ids, quant = None, replace(quant, solver="hqq")
    chosen: dict[str, Any] = {}
    if target.given and ids is not None:
        with progress_bar("measuring", quiet) as progress:
            again = bool(options.get("requantize"))
            mix = _mixed(path, ids, quant, target, progress, trust_remote_code, again)
        quant = replace(quant, weights=mix.formats)
        count = Counter(str(form) for form in mix.formats.values())
        chosen = {
            "bits_per_weight": mix.bits_per_weight,
            "loss": mix.loss,
            "formats": dict(count.most_common()),
        }
    probe, unmeasured = _probe(path, trust_remote_code) if measured else (None, None)
    with progress_bar("converting", quiet) as progress:
        convert(
            path,
            out,
            quant=quant,
            for_cpu=for_ == "cpu",
            overwrite=overwrite,
            progress=progress,
            trust_remote_code=trust_remote_code,
            # Once formats are chosen, no text has to be kept for it.
            calibration=_for_solver(ids, quant, whole=target.given),
            probe=probe,
            **options,
        )
    made = Checkpoint.open(out)
    chosen["solver"] = made.config["quantization_config"]["solver"]
    nbytes = sum(file.nbytes for file in made.all_files)
    if unmeasured is not None:
        logger.warning("the loss was not measured: %s", unmeasured)
    if probe is not None and probe.missed:
        missed = f"{probe.missed}, `qoff eval {out} --reference {source}` measures it"
        logger.warning("the loss was not measured: %s", missed)
    if probe is not None and probe.loss is not None:
        loss = probe.loss
        chosen |= {"kl": loss.kl, "kl_error": loss.error, "kl_tokens": loss.tokens}
    if probe is not None and probe.lossless:
        chosen["lossless"] = True
    return {"path": str(out), "layers": len(made.layers), "bytes": nbytes, **chosen}


def warn_of_kept(source: str, found: Mapping[str, Any], context: typer.Context) -> None:
    """Warn of options for float weights where most matrices were quantized already."""
    given = named(context, ("bits", "group_size", "solver")).values()
    if given and found["solver"] == IMPORTED:
        logger.warning(
            "%s: is quantized already and keeps its codes; %s changed only what was not. For "
            "another format convert the model of which it was made",
            source,
            ", ".join(given),
        )


def _check_model(path: Path) -> None:
    """Raise for what cannot be converted, as far as configuration and headers tell."""
    source = open_source(path)
    if modules_source(source) is None:
        Unconverted.of(source)
    else:
        source.config()


def _probe(source: Path, trust_remote_code: bool) -> tuple[LossProbe | None, FormatError | None]:
    """What measures the loss on prose that comes with qoff, or why there is none: no tokenizer."""
    from qoff.eval.perplexity.models import tokenizer_of

    try:
        tokenizer = tokenizer_of(source, trust_remote_code)
    except FormatError as error:
        return None, error
    # With what a text begins with: some models say little without it.
    return LossProbe(torch.tensor(tokenizer.encode(read_text(), verbose=False))), None


def loss_sentence(found: Mapping[str, Any], quant: QuantConfig, target: Target) -> str:
    """What a conversion lost, as a sentence; with what loses less where that was much."""
    kl, error = found["kl"], found["kl_error"]
    digits = _digits(error)
    said = (
        f"KL divergence from the source: {kl:.{digits}f} +- {error:.{digits}f} nats a token, on "
        f"{found['kl_tokens']} tokens of English"
    )
    if kl <= _MUCH:
        return said
    missing = math.log(kl / _MUCH, _LESS_PER_BIT) if kl < math.inf else 8
    bits = next((bits for bits in BITS if bits >= quant.bits + missing), 8)
    better = [
        option
        for option, helps in (
            ("--solver gptq", quant.solver not in CALIBRATED),
            ("--group-size 32", quant.group_size > 32),
            (f"--bits {bits}", quant.bits < 8 and not target.given),
            (f"--max-kl {_MUCH}", not target.given),
        )
        if helps
    ]
    much = f"{said}, which is much (more than {_MUCH})"
    return much + (f"; {', '.join(better)} lose less" if better else "")


def _digits(value: float) -> int:
    """Decimals that show two significant digits of a value, and four at least."""
    return max(4, 1 - math.floor(math.log10(value))) if 0 < value < math.inf else 4


def formats_of(texts: Iterable[str]) -> dict[str, Format]:
    """Formats by pattern, from texts like "*.down_proj=8,64": bits and group size.

    Raises QoffError for another text, or a format that does not exist.
    """
    found = {}
    for text in texts:
        match = _FORMAT.fullmatch(text)
        if match is None:
            raise QoffError(
                f"--weight {text!r} is not NAME=BITS,GROUP; write one like '*.down_proj=8,64'"
            )
        if match[1] in found:
            raise ArgumentError(f"--weight {text!r}: {match[1]} has a format already")
        try:
            found[match[1]] = Format(int(match[2]), int(match[3]))
        except QoffError as error:
            raise ArgumentError(f"--weight {text!r}: {error}") from error
    return found


def calibration_ids(
    source: Path, file: Path, trust_remote_code: bool = False, most: int = _TEXTS
) -> Tensor:
    """Token ids of a text in UTF-8 by the tokenizer of a model, int64 [texts, 512], in order.

    `most` pieces spread over a long text, of which no more is tokenized than they need; a shorter
    one has fewer. Each begins with what the tokenizer puts before a text, if anything. Raises
    ArgumentError as `read_text` does, QoffError for a file without a whole piece, FormatError for a
    model without a tokenizer, or with one that knows more tokens than the model.
    """
    from qoff.eval.perplexity.models import tokenizer_of

    text = read_text(file)
    tokenizer = tokenizer_of(source, trust_remote_code)
    ids = _excerpts(tokenizer, text, most)
    ids = encode(tokenizer, text) if ids is None else ids
    config = open_source(source).config()
    known = (config.get("text_config") or config).get("vocab_size")
    if known is not None and len(ids) and int(ids.max()) >= known:
        raise FormatError(
            f"{source}: its tokenizer says {int(ids.max())}, and the model knows {known} tokens; "
            "they are not of one model"
        )
    pieces = len(ids) // TOKENS
    if not pieces:
        raise QoffError(
            f"{file}: has {len(ids)} tokens; calibration needs at least {TOKENS}, "
            f"better {most * TOKENS}"
        )
    kept = min(pieces, most)
    chosen = torch.arange(kept) * pieces // kept
    return begun(ids[: pieces * TOKENS].view(pieces, TOKENS)[chosen], tokenizer)


def _excerpts(tokenizer: PreTrainedTokenizerBase, text: str, count: int) -> Tensor | None:
    """Token ids of pieces spread over a text, int64 [n].

    None for a text that is read as a whole: it is short, or a piece takes more characters.
    """
    if len(text) < 2 * count * _EXCERPT:
        return None
    found = []
    for number in range(count):
        start = number * len(text) // count
        excerpt = text[start : start + _EXCERPT]
        word = excerpt.find(" ", 0, _EXCERPT // 8) if number else -1  # not from within one
        ids = encode(tokenizer, excerpt[word + 1 :])[:TOKENS]
        if len(ids) < TOKENS:
            return None
        found.append(ids)
    return torch.cat(found)


def _for_solver(ids: Tensor | None, quant: QuantConfig, whole: bool = False) -> Tensor | None:
    """The texts that the solver wants; not whole: those that losses are not measured on."""
    if ids is None or quant.solver not in CALIBRATED:
        return None
    return ids if whole or len(ids) == 1 else ids[torch.arange(len(ids)) % 3 > 0]


def _mixed(
    source: Path,
    ids: Tensor,
    quant: QuantConfig,
    target: Target,
    progress: Callable[[int, int], None],
    trust_remote_code: bool,
    requantize: bool,
) -> Any:
    """The `Mix` of formats that is chosen for a target, on some of the texts."""
    from qoff.eval.mixing.by_modules import ModuleSensitivities
    from qoff.eval.mixing.mixing import mixed_for_bits, mixed_for_loss
    from qoff.eval.mixing.native import NativeSensitivities
    from qoff.eval.mixing.sensitivity import Sensitivities

    opened, rest = open_source(source), _for_solver(ids, quant)
    by_modules = modules_source(opened)
    sensitivities: Sensitivities[Any] = (
        NativeSensitivities(
            Unconverted.of(opened),
            ids[::3],
            quant,
            calibration=rest,
            bits=target.bits,
            requantize=requantize,
        )
        if by_modules is None
        else ModuleSensitivities(
            by_modules,
            ids[::3],
            quant,
            calibration=rest,
            trust_remote_code=trust_remote_code,
            bits=target.bits,
        )
    )
    found = sensitivities.of(progress=progress)
    if target.bits is not None:
        return mixed_for_bits(sensitivities, found, target.bits)
    assert target.loss is not None
    return mixed_for_loss(sensitivities, found, target.loss)


def sentence(found: Mapping[str, Any]) -> str:
    """The chosen formats, as a sentence."""
    counts = ", ".join(
        f"{counted(n, 'matrix', 'matrices')} of {form}" for form, n in found["formats"].items()
    )
    return (
        f"{found['bits_per_weight']:.3f} bits a weight in layers ({counts}); KL divergence "
        f"{found['loss']:.{_digits(found['loss'])}f} nats a token, measured on the calibration text"
    )
