"""`qoff eval`: what compression costs, on a text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qoff.checkpoint.layout import CONFIG_FILE
from qoff.errors import ArgumentError, FormatError
from qoff.eval.kv.setting import KVSetting
from qoff.eval.perplexity.metrics import Summary, summarize
from qoff.eval.perplexity.models import (
    bits_per_weight,
    cached_reference,
    open_runtime,
    subject_of,
    tokenizer_of,
)
from qoff.eval.perplexity.peers import Peer, available, changed
from qoff.eval.perplexity.reference import Reference
from qoff.eval.perplexity.scoring import Sample, evaluate
from qoff.eval.perplexity.windows import cut
from qoff.eval.sweep import cells as tables
from qoff.eval.sweep.grid import Cell, Grid
from qoff.eval.sweep.sweep import Sweep, decode_rate
from qoff.eval.texts import CALIBRATION_TEXT, dataset_text, encode, read_text
from qoff.hf.load import find_checkpoint, is_checkpoint, load_tokenizer, local_source
from qoff.kvcache import KVQuant
from qoff.models.sources import read_json
from qoff.quant import QuantConfig
from qoff.quant.matrix import CALIBRATED
from qoff.units import format_size

from .convert import calibration_ids
from .output import print_json, print_table, progress_bar


@dataclass(frozen=True)
class TextOptions:
    """Which text, and how it is cut."""

    text: Path | None
    dataset: str | None
    window: int
    stride: int | None
    definition: str
    limit: int | None

    def sample(self, tokenizer: PreTrainedTokenizerBase) -> Sample:
        """The text's tokens and windows. Raises ArgumentError for both a text and a dataset."""
        if self.text is not None and self.dataset is not None:
            raise ArgumentError("give --text or --dataset, not both")
        text = read_text(self.text) if self.dataset is None else dataset_text(self.dataset)
        ids = encode(tokenizer, text)
        windows = cut(
            len(ids),
            self.window,
            stride=self.stride,
            definition=self.definition,
            limit=self.limit,
        )
        return Sample(ids, windows, tokenizer.eos_token_id)


def kv_setting(bits: str | None, window: int, top: float, every_token: bool) -> KVSetting:
    """The cache that the options describe. Raises ArgumentError for what does not fit together."""
    if bits in (None, "none"):
        if every_token or top < 1:
            raise ArgumentError("--every-token and --attention-top need --kv")
        return KVSetting()
    assert bits is not None
    plain = KVQuant.of(bits, window, top)
    return KVSetting(plain, every_token)


@contextmanager
def _reference(
    path: str | None, sample: Sample, tokenizer: PreTrainedTokenizerBase, quiet: bool
) -> Iterator[Reference | None]:
    """The reference's predictions, computed if they have not been yet; None without a path."""
    if path is None:
        yield None
        return
    with progress_bar("reference", quiet) as progress:
        found = cached_reference(local_source(path), sample, tokenizer, progress=progress)
    with closing(found):
        yield found


def evaluate_one(
    model: str,
    options: TextOptions,
    kv: KVSetting,
    *,
    reference: str | None,
    quant: QuantConfig,
    device: str,
    device_memory: str | None,
    activation_bits: int,
    batch: int,
    as_json: bool,
) -> None:
    """Evaluate one model and print a table."""
    with progress_bar("converting", quiet=as_json) as progress:
        given = None if quant == QuantConfig() else quant
        checkpoint = find_checkpoint(model, quant=given, for_cpu=device == "cpu", progress=progress)
    tokenizer = load_tokenizer(checkpoint)
    sample = options.sample(tokenizer)
    with (
        _reference(reference, sample, tokenizer, as_json) as truth,
        open_runtime(
            checkpoint,
            kv,
            device=device,
            device_memory=device_memory,
            activation_bits=activation_bits,
        ) as runtime,
        progress_bar("evaluating", quiet=as_json) as progress,
    ):
        start = time.perf_counter()
        subject = subject_of(runtime, model, kv)
        summary = summarize(evaluate(subject, sample, truth, batch=batch, progress=progress))
        read = sum(window.stop - window.start for window in sample.windows)
        found = {
            "model": model,
            "windows": len(sample.windows),
            "kv": kv.name,
            "bits_per_weight": bits_per_weight(checkpoint),
            "kv_bytes_per_token": kv.bytes_per_token(runtime.spec),
            "tokens_per_s": read / (time.perf_counter() - start),
            **summary.as_dict(),
        }
    if as_json:
        print_json(found)
    else:
        print_table("", _rows(found, summary))


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
            ("median, 99 %, largest", f"{far.median_kl:.5f}, {far.kl_99:.4f}, {far.max_kl:.3f}"),
            ("same likeliest token", f"{far.same_top.value:.2%} ± {far.same_top.error:.2%}"),
        ]
    return [
        *rows,
        ("bits per weight", f"{found['bits_per_weight']:.2f}"),
        ("KV cache", f"{found['kv']}, {format_size(round(found['kv_bytes_per_token']))} a token"),
        ("read", f"{found['tokens_per_s']:.0f} tok/s"),
    ]


def run_sweep(
    model: str,
    options: TextOptions,
    *,
    grid: str,
    out: Path,
    reference: str | None,
    as_json: bool,
) -> None:
    """Evaluate a grid, and write table.md, table.csv, results.json and plots to `out`."""
    source = local_source(model)
    convertible = not is_checkpoint(source)
    if convertible:
        _check_floats(source)
    cells = Grid.parse(grid).cells(convertible)
    tokenizer = load_tokenizer(source)
    sample = options.sample(tokenizer)
    if reference is None and convertible:
        reference = model
    out.mkdir(parents=True, exist_ok=True)
    with _reference(reference, sample, tokenizer, as_json) as truth:
        calibration = _calibration(source, cells)
        sweep = Sweep(
            source, sample, out, reference=truth, rate=decode_rate, calibration=calibration
        )
        with progress_bar(f"{len(cells)} cells", quiet=as_json) as progress:
            progress(0, len(cells))
            results = sweep.run(cells, progress)
    for name, text in (
        ("table.md", tables.markdown(results)),
        ("table.csv", tables.as_csv(results)),
        ("results.json", tables.as_json(results)),
    ):
        (out / name).write_text(text)
    pictures = tables.draw(results, out)
    if as_json:
        print(tables.as_json(results), end="")
    else:
        print(tables.markdown(results), end="")
        print(f"wrote table.md, table.csv, results.json and {len(pictures)} pictures to {out}")


def _calibration(source: Path, cells: Sequence[Cell]) -> Tensor | None:
    """qoff's own text for it, if a cell's solver wants one."""
    solvers = {cell.weights.solver for cell in cells if cell.weights is not None}
    return calibration_ids(source, CALIBRATION_TEXT) if solvers & set(CALIBRATED) else None


def run_peers(model: str, options: TextOptions, as_json: bool) -> None:
    """Quantize the matrices of a float model by every package there is, and compare."""
    source = local_source(model)
    tokenizer = tokenizer_of(source)
    sample = options.sample(tokenizer)
    peers, missing = available()
    found: list[dict[str, Any]] = []
    rows = []
    with (
        _reference(model, sample, tokenizer, as_json) as truth,
        progress_bar(f"{len(peers)} ways", quiet=as_json) as progress,
    ):
        for done, peer in enumerate(peers):
            progress(done, len(peers))
            with changed(source, peer) as subject:
                summary = summarize(evaluate(subject, sample, truth))
            found.append({"name": peer.name, "bits_per_weight": peer.bits, **summary.as_dict()})
            rows.append(_peer_row(peer, summary))
    if as_json:
        print_json({"peers": found, "not_installed": missing})
        return
    print_table("", rows, ("weights", "bits", "ratio", "mean KL", "99 % KL", "same top"))
    if missing:
        print("not installed:", ", ".join(dict.fromkeys(missing)))


def _peer_row(peer: Peer, summary: Summary) -> tuple[str, ...]:
    far = summary.divergence
    assert far is not None  # there is a reference
    return (
        peer.name,
        f"{peer.bits:.2f}",
        str(far.perplexity_ratio),
        str(far.mean_kl),
        f"{far.kl_99:.4f}",
        f"{far.same_top.value:.2%}",
    )


def _check_floats(source: Path) -> None:
    """Raise ArgumentError for a model whose weights are quantized already."""
    try:
        quantized = read_json(source / CONFIG_FILE).get("quantization_config") is not None
    except FormatError:
        quantized = True
    if quantized:
        raise ArgumentError(
            f"{source}: a sweep quantizes a model in floats, a directory with safetensors, or "
            "takes a qoff checkpoint as it is; convert this one first: qoff convert"
        )
