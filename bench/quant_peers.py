"""Packed weights of qoff and of other projects: one model, one evaluator, one run.

Each quantizes the matrices of the layers of a float model by its own code, with the same
calibration text where it wants one. They are dequantized into that model, whose embedding, head and
norms stay as they are, and the model is compared with what it was, on texts that nothing was
calibrated on. So only weights differ. Means are over windows, with confidence intervals of 95 %;
differences from the first row are window by window, whose interval is far smaller.

The model is the demo's, moved off the 4-bit grid of its GGUF file (`bench.spread`), or `--model`, a
float model whose GGUF file is `--like`. llama.cpp and the packages come by `python -m bench.peers
llama.cpp quantizers`; what is not there is left out. Finished rows are kept in `--work`.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.demo import FOLDER, fetch_float, fetch_gguf
from bench.harness import Report, arguments
from bench.peers import native
from bench.peers.quantizers import PACKAGES, STEPS
from bench.spread import linear_layers, write
from qoff.checkpoint import Checkpoint, read_weight
from qoff.checkpoint.layout import QuantEntry
from qoff.cli.convert import calibration_ids
from qoff.errors import QoffError
from qoff.eval.mixing.mixing import mixed_for_bits
from qoff.eval.mixing.native import NativeSensitivities
from qoff.eval.perplexity.metrics import Scores, summarize
from qoff.eval.perplexity.models import open_float, stored_reference, tokenizer_of
from qoff.eval.perplexity.records import Records
from qoff.eval.perplexity.scoring import Sample, evaluate
from qoff.eval.perplexity.subjects import TransformersSubject
from qoff.eval.perplexity.windows import cut
from qoff.eval.texts import (
    CALIBRATION_TEXT,
    DEFAULT_TEXT,
    digest,
    encode,
    first_token,
    read_text,
)
from qoff.models import names
from qoff.models.convert.convert import convert
from qoff.models.convert.unconverted import Unconverted
from qoff.models.layer_weights import layer_weights
from qoff.models.sources import open_source
from qoff.models.spec import DecoderSpec
from qoff.quant import QTensor, QuantConfig
from qoff.schema import read_object, replace_text

WINDOW = 512  # tokens
Weights = tuple[Mapping[str, Tensor], float]  # matrices by name, and bits a weight of them
DEFAULT = "qoff gptq, group 32"
MIXED = (4.25, 4.77)  # bits a weight that formats are chosen for: those of IQ4_XS and of Q4_K_M
WIDTHS = ((2, 32), (3, 32), (3, 64), (5, 32), (5, 64))  # bits and groups of all matrices
LLAMA_CPP = (
    *("Q4_K_M", "Q4_K_S", "IQ4_XS"),
    *("Q5_K_S", "Q3_K_M", "IQ3_S", "IQ3_XXS", "Q2_K"),
)


@dataclass(frozen=True)
class Inputs:
    """What every peer gets: a float model, its tensors and GGUF file, token ids to calibrate on."""

    source: Path
    like: Path
    ids: Tensor
    folder: Path  # for files on the way
    steps: int


@dataclass(frozen=True)
class Peer:
    """A way to quantize matrices; missing: why it cannot be had here, if it cannot."""

    name: str
    weights: Callable[[Inputs], Weights]
    missing: str = ""


def ours(inputs: Inputs, quant: QuantConfig) -> Weights:
    """What a conversion stores."""
    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
        ids = inputs.ids if quant.solver == "gptq" else None
        path = convert(inputs.source, Path(folder, "x"), quant=quant, calibration=ids)
        checkpoint = Checkpoint.open(path)
        spec, found = DecoderSpec.from_config(checkpoint.config), dict[str, Tensor]()
        stored, count = 0, 0
        for i, file in enumerate(checkpoint.layers):
            prefix = names.layer_prefix(i)
            for weight in layer_weights(spec, i):
                entry = file.weights[prefix + weight.name]
                if not isinstance(entry, QuantEntry):
                    continue
                value = read_weight(file, entry)
                assert isinstance(value, QTensor)
                stored += 8 * entry.nbytes
                count += weight.rows * (weight.columns or 0)
                values = value.dequantize()
                for number, part in enumerate(weight.parts):
                    found[part.source] = values[weight.destination(number, 0, part.rows)].clone()
    return found, stored / count


def mixed(inputs: Inputs, bits: float) -> Weights:
    """What a conversion with `--target-bits` stores; formats are chosen by a third of the text."""
    quant, measured = QuantConfig(solver="gptq"), torch.arange(len(inputs.ids)) % 3 == 0
    model, solver = Unconverted.of(open_source(inputs.source)), inputs.ids[~measured]
    found = NativeSensitivities(model, inputs.ids[measured], quant, calibration=solver)
    formats = mixed_for_bits(found, found.of(), bits).formats
    return ours(inputs, replace(quant, weights=formats))


def package(inputs: Inputs, name: str) -> Weights:
    """What a package makes of the model, in an environment of its own."""
    python = native.quantizers_python()
    assert python is not None
    out = inputs.folder / "package.safetensors"
    work = {"peer": name, "model": str(inputs.source), "out": str(out), "steps": inputs.steps}
    native.answered(python, "quantizers", {**work, "ids": inputs.ids.tolist()})
    found = load_file(out)
    out.unlink()
    return found, PACKAGES[name][1]


def llama_cpp(inputs: Inputs, kind: str) -> Weights:
    """A type of llama-quantize with an importance matrix of the same calibration text."""
    from bench.peers.gguf_weights import GgufWeights

    state = load_file(inputs.source / "model.safetensors")
    files = GgufWeights(inputs.like, state, inputs.folder)
    return files.quantized(kind, files.importance(CALIBRATION_TEXT, len(inputs.ids)))


def peers(steps: int = STEPS) -> list[Peer]:
    """All, the one that others are compared with first."""
    no_llama = "" if native.llama_cpp("llama-imatrix") else "llama.cpp is not built"
    no_package = "" if native.quantizers_python() else "no environment of quantizers"
    own = [
        *((QuantConfig(4, group, solver), "") for solver in ("gptq", "hqq") for group in (32, 64)),
        (QuantConfig(4, 64, "gptq", scale_dtype=torch.float16), ", 16-bit scales"),
        *((QuantConfig(*form, "gptq"), f", {form[0]}-bit codes") for form in WIDTHS),
    ]
    return [
        *(
            Peer(f"qoff {quant.solver}, group {quant.group_size}{end}", partial(ours, quant=quant))
            for quant, end in own
        ),
        *(Peer(f"qoff gptq, {bits} bits", partial(mixed, bits=bits)) for bits in MIXED),
        *(
            Peer(f"llama.cpp {kind}, importance", partial(llama_cpp, kind=kind), no_llama)
            for kind in LLAMA_CPP
        ),
        *(
            Peer(
                f"{name}, {steps} steps" if name == "AutoRound" else name,
                partial(package, name=name),
                no_package,
            )
            for name in PACKAGES
        ),
    ]


def changed(model: Any, found: Mapping[str, Tensor], name: str) -> None:
    """Put a peer's matrices into a model. Raises QoffError for another shape, or none."""
    for layer, linear in linear_layers(model):
        values = found.get(f"{layer}.weight")
        if values is None or values.shape != linear.weight.shape or not values.isfinite().all():
            raise QoffError(f"{name} has no finite matrix of the same shape for {layer}")
        with torch.no_grad():
            linear.weight.copy_(values)


def by_window(values: Any, sample: Sample) -> list[float]:
    """Means over the scored tokens of each window."""
    ends = np.cumsum([window.scored for window in sample.windows])[:-1]
    return [float(part.mean()) for part in np.split(values, ends)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its interval of 95 % by Student's t."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, math.inf
    return mean, _student(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)


def _student(freedom: int) -> float:
    """The quantile 0.975 of Student's t, by its expansion about the normal's (Hill 1970)."""
    z = NormalDist().inv_cdf(0.975)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96,
             (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)  # fmt: skip
    return sum(term / freedom**i for i, term in enumerate(terms))


def judged(scores: Scores, sample: Sample) -> dict[str, Any]:
    """KL and losses by window, and the summary."""
    assert scores.kl is not None
    parts = {"kl": by_window(scores.kl, sample), "nll": by_window(scores.nll, sample)}
    return {**parts, "summary": summarize(scores).as_dict()}


def add_row(report: Report, name: str, found: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Add a peer to the table. found: "bits", and what `judged` has of each text."""
    row, measured = [name, f"{found['bits']:.3f}"], dict[str, Any](bits=found["bits"])
    every = list[float]()
    for text, mine in found["texts"].items():
        kl, half = interval(mine["kl"])
        base = first["texts"][text]["kl"]
        apart = [a - b for a, b in zip(mine["kl"], base, strict=True)]
        every += apart
        row += [f"{kl:.4f} ± {half:.4f}", f"{mine['summary']['perplexity']:.3f}"]
        measured[text] = {"kl": kl, "kl_half": half, "apart": interval(apart), **mine}
    mean, half = measured["apart"] = interval(every)
    row.append(f"{mean:+.4f} ± {half:.4f}")
    report.rows.append(tuple(row))
    report.measured[name] = measured


def samples(source: Path, paths: Sequence[Path], windows: int) -> dict[str, Sample]:
    """Windows that are spread over each text."""
    tokenizer = tokenizer_of(source)
    first, found = first_token(tokenizer), dict[str, Sample]()
    for path in paths:
        ids = encode(tokenizer, read_text(path))
        every = cut(len(ids), WINDOW, definition="llama.cpp")
        spread = every[:: max(1, len(every) // windows)][:windows]
        found[path.stem] = Sample(ids, spread, first=first)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__, argv, model=(Path, None, "a float model; default: the demo's, off its grid"),
        like=(Path, None, "its GGUF file; default: the demo's"),
        texts=(str, str(DEFAULT_TEXT), "texts that are scored, with commas between"),
        windows=(int, 12, f"windows of {WINDOW} tokens of each, second halves scored"),
        steps=(int, STEPS, "of AutoRound"), only=(str, "", "peers, with ; between"),
        pieces=(int, 24, "of 512 tokens of the calibration text, for all who want it"),
        work=(Path, FOLDER / "quant_peers", "folder of what is done"),
    )  # fmt: skip
    args.work.mkdir(parents=True, exist_ok=True)
    source, like = args.model or moved_demo(args.work), args.like or fetch_gguf()
    ids = calibration_ids(source, CALIBRATION_TEXT, most=args.pieces)
    inputs = Inputs(source, like, ids, args.work, args.steps)
    texts = [Path(path) for path in args.texts.split(",")]
    chosen = samples(source, texts, 1 if args.quick else args.windows)
    only = [name for name in args.only.split(";") if name]
    wanted = [p for p in peers(args.steps) if p.name == DEFAULT or not only or p.name in only]
    report = Report(
        "quant_peers",
        {
            "model": source.name,
            "texts": {path.stem: described(path) for path in texts},
            "windows": args.windows,
            "window": WINDOW,
            "pieces": len(ids),
        },
        f"packed weights against the float model; more than {DEFAULT}, over windows of all texts",
        ("weights", "bits", *(f"{w}, {t}" for t in chosen for w in ("KL", "perplexity")), "more"),
        notes=[f"{peer.name}: left out: {peer.missing}" for peer in wanted if peer.missing],
    )
    last_first = sorted(wanted, key=lambda peer: peer.name == DEFAULT)  # it takes longest
    rows = {p.name: row(p, inputs, chosen) for p in last_first if not p.missing}
    for peer in wanted:
        if peer.name in rows:
            add_row(report, peer.name, rows[peer.name], rows[DEFAULT])
    report.publish(args.out)


def described(path: Path) -> dict[str, Any]:
    """A text's size in bytes, and the first 12 hex digits of its SHA-256."""
    data = path.read_bytes()
    return {"sha256": hashlib.sha256(data).hexdigest()[:12], "bytes": len(data)}


def moved_demo(folder: Path) -> Path:
    """The demo model off its grid, made once."""
    path = folder / "SmolLM2-135M-Instruct-moved"
    if not path.exists():
        write(fetch_float(), path)
    return path


def row(peer: Peer, inputs: Inputs, chosen: Mapping[str, Sample]) -> dict[str, Any]:
    """What a peer comes to on each text, kept in a file; what was killed goes on by window."""
    asked = [
        str(inputs.source),
        digest(inputs.ids),
        {name: sample.digest for name, sample in chosen.items()},
    ]
    kept = inputs.folder / f"{digest(peer.name, asked)}.json"
    if kept.exists():
        return read_object(kept)
    weights = kept.with_suffix(".safetensors")
    if not weights.exists():
        matrices, bits = peer.weights(inputs)
        partial = weights.with_suffix(".partial")
        save_file(dict(matrices), partial, {"bits": str(bits)})
        partial.rename(weights)
    with safe_open(weights, "pt") as file:
        bits = float(file.metadata()["bits"])
    model, found = open_float(inputs.source), {}
    changed(model, load_file(weights), peer.name)
    subject = TransformersSubject(model, peer.name)
    tokenizer = tokenizer_of(inputs.source)
    for name, sample in chosen.items():
        file = inputs.folder / f"reference-{digest(asked, name)}"
        journal = kept.with_suffix(f".{name}")
        with (
            closing(stored_reference(inputs.source, sample, tokenizer, file)) as reference,
            closing(Records(journal, {"peer": peer.name})) as records,
        ):
            found[name] = judged(evaluate(subject, sample, reference, journal=records), sample)
    print(peer.name, f"{bits:.3f}", *(interval(x["kl"]) for x in found.values()), flush=True)
    replace_text(kept, json.dumps({"bits": bits, "texts": found}))
    for done in (weights, *(kept.with_suffix(f".{name}") for name in chosen)):
        done.unlink()
    return {"bits": bits, "texts": found}


if __name__ == "__main__":
    main()
