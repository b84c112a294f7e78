"""llama.cpp as a peer: prefill and decode rates of a GGUF file, batch 1, by its own llama-bench.

`python -m bench.peers llama.cpp` builds it for this processor. Each measurement is a process of its
own, which loads the file and runs once to warm up.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.peers import native
from qoff.errors import FormatError

KV_TYPES = ("f16", "q8_0", "q4_0")
FORMATS = ("Q4_0", "Q4_1", "Q4_K_M", "Q8_0")  # of weights, as llama-quantize calls them
VERSION = f"llama.cpp of llama-cpp-python {native.LLAMA_CPP}, built for this processor"


def installed() -> bool:
    """Whether llama.cpp is built."""
    return native.llama_cpp("llama-bench") is not None


def quantized_path(path: Path, form: str) -> Path:
    """Where a GGUF file is kept in another format of `FORMATS`: beside the peers."""
    own = path.stem.endswith(form)
    return path if own else native.folder() / "models" / f"{path.stem}-to-{form}.gguf"


def quantized(path: Path, form: str) -> Path:
    """Return a GGUF file in another format, requantized if it is not there yet.

    Raises `PeerNotBuiltError` without llama.cpp, `FormatError` for a file that it refuses.
    """
    target = quantized_path(path, form)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        run("llama-quantize", "--allow-requantize", str(path), str(partial), form)
        partial.rename(target)
    return target


@dataclass(frozen=True)
class LlamaCpp:
    """A GGUF file in llama.cpp on the CPU, with K and V of one of `KV_TYPES`."""

    path: Path
    threads: int
    kv: str = "f16"

    def prefill(self, tokens: int) -> float:
        """Tokens per second of one prefill of `tokens` tokens."""
        return self._rate("-p", str(tokens), "-n", "0")

    def decode(self, tokens: int, depth: int) -> float:
        """Tokens per second of decoding `tokens` tokens after a prompt of `depth`."""
        return self._rate("-p", "0", "-n", str(tokens), "-d", str(depth))

    def perplexity(self, text: Path, window: int, windows: int) -> float:
        """Perplexity of the second halves of the first `windows` windows of a text file."""
        cut = ("-c", str(window), "--chunks", str(windows))
        out = run("llama-perplexity", "-m", str(self.path), "-f", str(text), *cut,
                   "-t", str(self.threads))  # fmt: skip
        found = re.findall(r"\[\d+\]([0-9.]+)", out)  # of the windows so far
        if len(found) != windows:
            raise FormatError(
                f"llama-perplexity {self.path}: {len(found)} estimates in its output, not {windows}"
            )
        return float(found[-1])

    def _rate(self, *options: str) -> float:
        fixed = ("-t", str(self.threads), "-r", "1", "-o", "json", "-fa", "1")
        kv = ("-ctk", self.kv, "-ctv", self.kv)
        out = run("llama-bench", "-m", str(self.path), *fixed, *kv, *options)
        (test,) = json.loads(out)
        return float(test["avg_ts"])


def run(tool: str, *options: str | Path) -> str:
    """What one of llama.cpp's tools prints.

    Raises `PeerNotBuiltError` without llama.cpp, `FormatError` where the tool fails.
    """
    command = [native.built(tool), *options]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        said = " ".join(map(str, options))
        raise FormatError(f"{tool} {said}: exit status {done.returncode}: {last}")
    return done.stdout
