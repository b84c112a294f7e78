"""Perplexity of the demo model in every type that llama-quantize makes: imported, exact, llama.cpp.

llama-quantize requantizes the demo's GGUF file. Of each file qoff's import is evaluated, and
transformers with exactly the values of the file in float32. The difference is what the import
loses; types whose codes are taken over lose nothing but rounding. llama-perplexity reads the same
tokens with the same file, and with a copy of it in float32. It rounds the inputs of quantized
matrices to 8 bits, which moves perplexity by up to 1 %, differently on every kind of processor;
those of matrices in float32 it does not. So the bar is on the copy. Like it, the second half of
each window is scored. All on one thread: where other work takes a core now and then, threads that
wait for each other in every matrix take hours. With --rows, a run goes on where one before it
ended.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from bench.demo import fetch_gguf
from bench.harness import Bar, Report, arguments
from bench.peers.llama_cpp import LlamaCpp, quantized
from bench.sampling import torch_threads
from qoff.eval.perplexity.metrics import Divergence, summarize
from qoff.eval.perplexity.models import bits_per_weight, open_float, open_runtime, tokenizer_of
from qoff.eval.perplexity.scoring import Sample, evaluate, make_reference
from qoff.eval.perplexity.subjects import QoffSubject, TransformersSubject
from qoff.eval.perplexity.windows import cut
from qoff.eval.texts import DEFAULT_TEXT, encode, read_text
from qoff.models.convert.convert import convert
from qoff.quant import GGUFFile
from qoff.schema import read_object, replace_text

WINDOW = 512  # tokens
TYPES = (
    *("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_0", "Q5_K_M", "Q6_K", "Q8_0"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "BF16", "F16"),
)
_FLOATS = ("BF16", "F16")  # whose import is a conversion to 4 bits, which loses by design
_QUICK = ("Q4_0", "Q6_K")  # of which codes are taken over, and requantized
BAR = 0.995  # of llama.cpp's perplexity in float32, and of qoff's


def judge(path: Path, sample: Sample, folder: Path) -> tuple[Divergence, float]:
    """How far the import of a GGUF file is from its exact values, and bits of its weights."""
    truth = TransformersSubject(open_float(path), path.name)
    with closing(make_reference(truth, sample, folder / "reference")) as reference:
        del truth
        checkpoint = convert(path, folder / path.stem, for_cpu=True)
        with open_runtime(checkpoint, length=WINDOW) as runtime:
            subject = QoffSubject(runtime, path.stem)
            found = summarize(evaluate(subject, sample, reference)).divergence
        assert found is not None
        return found, bits_per_weight(checkpoint)


def measure(source: Path, kind: str, sample: Sample) -> tuple[list[str], dict[str, float]]:
    """The row of a type, and its figures."""
    path = quantized(source, kind)
    with tempfile.TemporaryDirectory() as folder:
        found, bits = judge(path, sample, Path(folder))
    lost, exact = found.perplexity_ratio.value - 1, found.reference_perplexity.value
    peer = LlamaCpp(path, 1).perplexity(DEFAULT_TEXT, WINDOW, len(sample.windows))
    same = in_float32(path, len(sample.windows))
    apart, kl = exact * (1 + lost) / same - 1, found.mean_kl.value
    row = [
        kind, contents(path), f"{bits:.2f}", f"{exact:.3f}", f"{100 * lost:+.3f} %",
        f"{kl:.6f}", f"{peer:.3f}", f"{same:.3f}", f"{100 * apart:+.3f} %",
    ]  # fmt: skip
    figures = {"lost": lost, "kl": kl, "bits": bits, "apart": apart, "rounded": peer / same - 1}
    return row, figures


def in_float32(path: Path, windows: int) -> float:
    """llama.cpp's perplexity with a GGUF file's values in float32, of which no input is rounded."""
    copy = quantized(path, "F32")
    try:
        return LlamaCpp(copy, 1).perplexity(DEFAULT_TEXT, WINDOW, windows)
    finally:
        copy.unlink()  # four bytes a weight


def contents(path: Path) -> str:
    """The types of a file's matrices, most frequent first."""
    file = GGUFFile(path)
    kinds = Counter(file.tensor_type(x) for x in file.tensors if len(file.shape(x)) > 1)
    return ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__, argv, windows=(int, 4, f"windows of {WINDOW} tokens"),
        types=(str, ",".join(TYPES), "types of llama-quantize, with commas between"),
        rows=(Path, None, "JSON file of rows, made before or written as they come"),
    )  # fmt: skip
    types = _QUICK if args.quick else args.types.split(",")
    count = 1 if args.quick else args.windows
    source = fetch_gguf()
    tokenizer = tokenizer_of(source)
    ids = encode(tokenizer, read_text())
    windows = cut(len(ids), WINDOW, definition="llama.cpp", limit=count)
    sample, rows = Sample(ids, windows), {}
    if args.rows is not None and args.rows.exists():
        rows = read_object(args.rows)
    result = Report(
        "gguf_types",
        {"windows": count, "window": WINDOW},
        "The demo model in types of GGUF: perplexity of the import against its exact values",
        ("type", "matrices", "bits imported", "exact perplexity", "of the import", "KL",
         "llama.cpp", "llama.cpp, float32", "import against that"),
    )  # fmt: skip
    for kind in types:
        key = f"{kind}, {count} windows, float32 beside"
        with torch_threads(1):
            rows[key] = rows.get(key) or measure(source, kind, sample)
        row, result.measured[kind] = rows[key]
        result.rows.append(tuple(row))
        print(*row, sep=" | ", flush=True)
        if args.rows is not None:
            replace_text(args.rows, json.dumps(rows, indent=1))
    apart = [abs(x["apart"]) for kind, x in result.measured.items() if kind not in _FLOATS]
    if apart:
        most = 1 - max(apart)
        result.bars.append(Bar("agreement of perplexities with llama.cpp's in float32", BAR, most))
    result.publish(args.out)


if __name__ == "__main__":
    main()
