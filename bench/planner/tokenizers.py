"""What tokenizers of made-up vocabularies keep in memory, beside the estimate from their files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import Bar, Report
from bench.planner.budgets import tokenizer_bytes as taken
from qoff.plan.tokenizer import tokenizer_bytes as estimated

_MIB = 1 << 20
_OFF = 0.25  # part of what is taken
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def measure(quick: bool) -> Report:
    """Vocabularies of both kinds, each read by a process of its own."""
    result = Report(
        "planner-tokenizers",
        {"quick": quick},
        "memory that a tokenizer keeps, and the estimate from its file",
        ("kind", "tokens", "file MiB", "taken MiB", "estimated MiB"),
    )
    off = []
    for kind, model in (("BPE", _bpe), ("Unigram", _unigram)):
        for size in (32_000,) if quick else (32_000, 128_000, 256_000):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                _save(folder, model(size))
                command = [sys.executable, "-m", __name__, name]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                guess, found = estimated(folder), int(done.stdout.splitlines()[-1])
                file = (folder / "tokenizer.json").stat().st_size
            off.append(abs(guess / found - 1))
            mib = [f"{n / _MIB:.1f}" for n in (file, found, guess)]
            result.rows.append((kind, f"{size:,}", *mib))
            result.measured[f"{kind} {size}"] = {"file": file, "taken": found, "estimated": guess}
    result.bars.append(Bar("1 - largest error of the estimate", 1 - _OFF, 1 - max(off)))
    return result


def _words(count: int) -> list[str]:
    """Different words, as long as tokens are: 6.5 letters on average."""
    draw, found = random.Random(0), dict[str, None]()
    while len(found) < count:
        length = min(16, max(2, round(draw.gauss(6.5, 2.5))))
        found["".join(draw.choices(_LETTERS, range(26, 0, -1), k=length))] = None
    return list(found)


def _bpe(size: int) -> dict[str, Any]:
    """Each token merges the one that is a letter shorter; half of them are words' beginnings."""
    vocab = {letter: i for i, letter in enumerate([*_LETTERS, "\u0120"])}
    merges = []
    for word in _words(size):
        word = "\u0120" + word if len(vocab) % 2 else word
        for stop in range(2, len(word) + 1):
            if word[:stop] not in vocab and len(vocab) < size:
                vocab[word[:stop]] = len(vocab)
                merges.append([word[: stop - 1], word[stop - 1]])
        if len(vocab) == size:
            break
    return {"type": "BPE", "vocab": vocab, "merges": merges}


def _unigram(size: int) -> dict[str, Any]:
    pieces = [["<unk>", 0.0], *([word, -1e-4 * i] for i, word in enumerate(_words(size - 1)))]
    return {"type": "Unigram", "unk_id": 0, "vocab": pieces}


def _save(folder: Path, model: dict[str, Any]) -> None:
    """As `Tokenizer.save` writes it, indented, and what transformers reads beside it."""
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    tokenizer: dict[str, Any] = {"version": "1.0", "added_tokens": [], **dict.fromkeys(parts)}
    tokenizer["model"] = model
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "e"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _child(folder: Path) -> None:
    """Print what a tokenizer takes, in a process that has read a small one before."""
    with tempfile.TemporaryDirectory() as small:
        _save(Path(small), _bpe(100))
        taken(Path(small))
    print(taken(folder))


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
