"""`qoff eval` of a text: perplexity, and divergence from an original, window by window."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qoff import __version__
from qoff.checkpoint import Checkpoint
from qoff.errors import QoffError
from qoff.eval.kv import kv_bytes_per_token, kv_name, why_unmeasured
from qoff.eval.perplexity.metrics import Divergence, Summary, significant, summarize
from qoff.eval.perplexity.models import (
    PIECE_TOKENS,
    bits_per_weight,
    check_tokenizers,
    model_stamps,
    open_runtime,
    opened_original,
    stored_reference,
)
from qoff.eval.perplexity.records import Records
from qoff.eval.perplexity.reference import Reference
from qoff.eval.perplexity.scoring import Original, Sample, Truth, evaluate
from qoff.eval.perplexity.subjects import QoffSubject
from qoff.eval.texts import digest
from qoff.hf.checkpoints import local_source
from qoff.hf.stamps import source_stamps
from qoff.hf.tokenizer import load_tokenizer
from qoff.kvcache import KVQuant
from qoff.quant import QuantConfig
from qoff.settings import cache_directory
from qoff.units import counted, format_size

from .options import FormOptions, ReferenceOptions, RunOptions, TextOptions
from .output import print_json, print_table
from .progress import score_progress

logger = logging.getLogger(__name__)
_KEPT_S = 30 * 24 * 3600


@contextmanager
def _truth(
    original: ReferenceOptions, sample: Sample, tokenizer: PreTrainedTokenizerBase, batch: int
) -> Iterator[Truth | None]:
    """What is compared with: a model that is opened, or a file; None without either."""
    source = None if original.reference is None else local_source(original.reference)
    options: dict[str, Any] = {"batch": batch, "memory": original.memory}
    if original.reference_file is not None:
        with stored(source, sample, tokenizer, original.reference_file, **options) as found:
            yield found
    elif source is not None:
        check_tokenizers(source, tokenizer)
        with opened_original(source, sample, **options) as subject:
            yield Original(subject)
    else:
        yield None


@contextmanager
def stored(source: Path | None, sample: Sample, *what: Any, **options: Any) -> Iterator[Reference]:
    """The file of `stored_reference`, opened; progress is shown where it is made."""
    with score_progress("reference") as tell:
        found = stored_reference(source, sample, *what, **options, tell=tell)
    with closing(found):
        yield found


def evaluate_one(
    model: str,
    texts: TextOptions,
    cache: FormOptions,
    how: RunOptions,
    quant: QuantConfig,
    original: ReferenceOptions,
    batch: int,
    as_json: bool,
) -> None:
    """Evaluate one model and print a table. Windows that an interrupted run has done are kept."""
    content = texts.content()
    original.check()
    cache.check(how)
    checkpoint = how.checkpoint(model, quant, as_json)
    tokenizer = load_tokenizer(checkpoint, how.trust_remote_code)
    sample = texts.sample(tokenizer, content)
    kv = cache.quant(checkpoint, how)
    options = {**how.opening(), "kv": kv, "length": sample.longest, "batch_size": batch}
    with (
        _journal(checkpoint, sample, options, original) as journal,
        _truth(original, sample, tokenizer, batch) as truth,
        open_runtime(checkpoint, **options) as runtime,
        score_progress("evaluating") as tell,
    ):
        asked = [kv] if isinstance(kv, KVQuant) else []
        warn_of_windows(sample, asked, Checkpoint.open(checkpoint).config)
        done = set(journal.windows) if journal is not None else set()
        left = [window for i, window in enumerate(sample.windows) if i not in done]
        start = time.perf_counter()
        subject = QoffSubject(runtime, model, PIECE_TOKENS)
        scores = evaluate(subject, sample, truth, batch=batch, journal=journal, tell=tell)
        summary = summarize(scores)
        found = {
            "model": model,
            "windows": len(sample.windows),
            "windows_done_before": len(done),
            "kv": kv_name(runtime.kv),
            "bits_per_weight": bits_per_weight(checkpoint),
            "kv_bytes_per_token": kv_bytes_per_token(runtime.kv, runtime.spec),
            "tokens_per_s": sum(w.stop - w.start for w in left) / (time.perf_counter() - start),
            **summary.as_dict(),
        }
        if journal is not None:
            journal.remove()
    if as_json:
        print_json(found)
    else:
        print_table("", _rows(found, summary))


def warn_of_windows(
    sample: Sample, caches: Iterable[KVQuant | None], config: Mapping[str, Any]
) -> None:
    """Warn of windows that do not measure these caches, or are longer than a model's positions."""
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    if isinstance(positions, int) and sample.longest - 1 > positions:
        logger.warning(
            "windows of %d tokens are longer than the %d positions that the model has, beyond "
            "which it predicts worse; use --window %d",
            sample.longest,
            positions,
            positions,
        )
    for kv in caches:
        if why := why_unmeasured(kv, sample.longest, PIECE_TOKENS):
            logger.warning("%s", why)


@contextmanager
def _journal(
    checkpoint: Path, sample: Sample, options: Mapping[str, Any], original: ReferenceOptions
) -> Iterator[Records | None]:
    """Where the windows of an evaluation are kept; None, with a warning, where they cannot be."""
    says = _depends_on(checkpoint, sample, options, original)
    folder = cache_directory() / "evaluations"
    _drop_old(folder)
    journal = None
    try:
        journal = Records(folder / digest(says), says)
    except QoffError as error:
        logger.warning("this evaluation cannot be continued if it is interrupted: %s", error)
    with nullcontext() if journal is None else closing(journal):
        yield journal


def _depends_on(
    checkpoint: Path, sample: Sample, options: Mapping[str, Any], original: ReferenceOptions
) -> dict[str, Any]:
    """All that the figures of an evaluation depend on."""
    stored = original.reference_file
    source = None if original.reference is None else local_source(original.reference)
    file = None if stored is None else str(stored.resolve())
    if stored is not None and source is None:  # else what it has to have follows from the source
        file = digest(source_stamps(stored))
    return {
        "kind": "evaluation",
        "qoff": __version__,
        "model": [str(checkpoint.resolve()), *model_stamps(checkpoint)],
        "text": sample.digest,
        "kv": repr(options["kv"]),
        "numbers": [str(options["device"]), str(options["dtype"]), options["activation_bits"]],
        "reference": None if source is None else [str(source.resolve()), *model_stamps(source)],
        "reference_file": file,
    }


def _drop_old(folder: Path) -> None:
    """Remove what evaluations have left that nobody has continued for a month."""
    with suppress(OSError):
        for file in folder.iterdir():
            if time.time() - file.stat().st_mtime > _KEPT_S:
                file.unlink()


def _rows(found: dict[str, Any], summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("tokens scored", f"{summary.tokens} in {counted(found['windows'], 'window')}"),
        ("perplexity", str(summary.perplexity)),
    ]
    far = summary.divergence
    if far is not None:
        rows += [
            ("perplexity of the reference", str(far.reference_perplexity)),
            ("ratio of the two", str(far.perplexity_ratio)),
            ("mean KL, nats", str(far.mean_kl)),
            *_stored_rows(far),
            (
                "median, 99 %, largest",
                ", ".join(map(significant, (far.median_kl, far.kl_99, far.max_kl))),
            ),
            ("same likeliest token", far.same_top.percent),
        ]
    return [
        *rows,
        ("bits per weight", f"{found['bits_per_weight']:.2f}"),
        ("KV cache", f"{found['kv']}, {format_size(round(found['kv_bytes_per_token']))} a token"),
        ("read", f"{found['tokens_per_s']:.0f} tok/s"),
    ]


def _stored_rows(far: Divergence) -> list[tuple[str, str]]:
    """What a reference that keeps the likeliest tokens alone leaves open."""
    if not far.kl_draws_error:
        return []
    return [
        ("of its error, by what is not stored", significant(far.kl_draws_error)),
        ("KL for certain", f"{significant(far.kl_at_least)} to {significant(far.kl_at_most)}"),
    ]
