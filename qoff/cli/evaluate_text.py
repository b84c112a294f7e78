"""`qoff eval` of a text: perplexity, and divergence from an original, window by window."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qoff import __version__
from qoff.eval.kv import kv_bytes_per_token, kv_name
from qoff.eval.perplexity.metrics import Divergence, Summary, summarize
from qoff.eval.perplexity.models import (
    PIECE_TOKENS,
    bits_per_weight,
    check_tokenizers,
    open_runtime,
    opened_original,
    stored_reference,
)
from qoff.eval.perplexity.records import Records
from qoff.eval.perplexity.reference import Reference
from qoff.eval.perplexity.scoring import Original, Sample, Truth, evaluate
from qoff.eval.perplexity.subjects import QoffSubject
from qoff.eval.texts import digest
from qoff.hf.load import load_tokenizer, local_source, source_stamps
from qoff.models.runtime import Runtime
from qoff.quant import QuantConfig
from qoff.settings import cache_directory
from qoff.units import format_size

from .options import FormOptions, ReferenceOptions, RunOptions, TextOptions
from .output import print_json, print_table
from .progress import score_progress


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
    checkpoint = how.checkpoint(model, quant, as_json)
    tokenizer = load_tokenizer(checkpoint, how.trust_remote_code)
    sample = texts.sample(tokenizer)
    options = {**how.opening(), "kv": cache.quant(), "length": sample.longest, "batch_size": batch}
    with (
        _truth(original, sample, tokenizer, batch) as truth,
        open_runtime(checkpoint, **options) as runtime,
        closing(Records(*_journal(checkpoint, sample, runtime, options, original))) as journal,
        score_progress("evaluating") as tell,
    ):
        done = set(journal.windows)
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
        journal.remove()
    if as_json:
        print_json(found)
    else:
        print_table("", _rows(found, summary))


def _journal(
    checkpoint: Path,
    sample: Sample,
    runtime: Runtime,
    options: Mapping[str, Any],
    original: ReferenceOptions,
) -> tuple[Path, dict[str, Any]]:
    """Where the windows of an evaluation are kept, and all that its figures depend on."""
    stored = original.reference_file
    source = None if original.reference is None else local_source(original.reference)
    says = {
        "kind": "evaluation",
        "qoff": __version__,
        "model": source_stamps(checkpoint),
        "text": sample.digest,
        "kv": repr(runtime.kv),
        "numbers": [str(options["device"]), str(options["dtype"]), options["activation_bits"]],
        "reference": None if source is None else source_stamps(source),
        "reference_file": None if stored is None else source_stamps(stored),
    }
    return cache_directory() / "evaluations" / digest(says), says


def _rows(found: dict[str, Any], summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("tokens scored", f"{summary.tokens} in {found['windows']} windows"),
        ("perplexity", str(summary.perplexity)),
    ]
    far = summary.divergence
    if far is not None:
        rows += [
            ("perplexity of the reference", str(far.reference_perplexity)),
            ("ratio of the two", str(far.perplexity_ratio)),
            ("mean KL, nats", str(far.mean_kl)),
            *_stored_rows(far),
            ("median, 99 %, largest", f"{far.median_kl:.5f}, {far.kl_99:.4f}, {far.max_kl:.3f}"),
            ("same likeliest token", f"{far.same_top.value:.2%} ± {far.same_top.error:.2%}"),
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
        ("of its error, by what is not stored", f"{far.kl_draws_error:.6f}"),
        ("KL for certain", f"{far.kl_at_least:.5f} to {far.kl_at_most:.5f}"),
    ]
