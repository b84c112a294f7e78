"""A mixture of experts larger than memory beside llama.cpp, which maps the same weights.

A random Qwen3-MoE is written as a checkpoint and as a GGUF file of the same weights (`--layers` of
0.33 GiB each; both are deleted unless `--path` keeps them). Every run is a process of its own in a
control group (v1, so this needs root) of `--limit`, cached pages included: llama.cpp and qoff in
turn, one sequence and then 64. llama.cpp runs with `mmap` and without repacking its weights, which
would need memory for all of them; `python -m bench.peers llama.cpp` builds it. With `--samples`, a
run goes on where one before it ended, and with `--minutes` it ends in time: it writes the files, or
takes a sample, and further ones that took no longer than is left. The last part writes the result.

    python -m bench.experts_peers                                # 30 layers, 2 GiB: half an hour
    python -m bench.experts_peers --path DIR --samples FILE --minutes 9      # again and again
    python -m bench.experts_peers --quick
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.control_group import ControlGroup, control_group, forget
from bench.experts_stream import QWEN3_MOE
from bench.harness import Bar, Report, out_file
from bench.peers import native, servers
from bench.random_gguf import RandomGguf
from bench.random_model import write_random_checkpoint
from bench.sampling import torch_threads
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.schema import read_object, replace_text
from qoff.units import format_size, parse_size

_LAYER_BYTES = 360 << 20  # of one layer's weights, in each of the two files
_BESIDE = 512 << 20  # of a limit: what Python, torch and caches of files take
_SEQUENCES = 64
BARS = {"one": 3.0, "many": 20.0}  # times llama.cpp
DISK_BAR = 0.9


class Contest:
    """llama.cpp and qoff on the same weights, in the same memory."""

    def __init__(self, folder: Path, group: ControlGroup, budget: int, threads: int) -> None:
        self.checkpoint, self.gguf = folder / "checkpoint", folder / "model.gguf"
        self._group, self._budget, self._threads = group, budget, threads

    def qoff(self, which: str, prompt: int, tokens: int) -> dict[str, Any]:
        """What `bench.experts_stream` finds: "one" sequence, or "many"."""
        self._forget()
        sizes = ["--prompt", str(prompt), "--tokens", str(tokens), "--only", which]
        command = [sys.executable, "-m", "bench.experts_stream", "--json", *sizes]
        command += ["--path", str(self.checkpoint), "--memory", str(self._budget)]
        found: dict[str, Any] = json.loads(self._group.output(command))
        return found

    def llama_one(self, prompt: int, tokens: int) -> float:
        """Tokens per second of decoding after a prompt, by llama-bench."""
        self._forget()
        tool, *options = self._llama("llama-bench")
        sizes = ["-p", "0", "-n", str(tokens), "-d", str(prompt), "-r", "1", "-o", "json"]
        out = self._group.output([tool, *options, "--repack", "0", "--no-warmup", *sizes])
        return float(json.loads(out)[0]["avg_ts"])

    def llama_many(self, prompt: int, tokens: int) -> float:
        """Tokens per second of 64 sequences that decode together, by llama-server."""
        self._forget()
        port = servers.free_port()
        context = _SEQUENCES * (prompt + tokens + 8)
        tool, *options = self._llama("llama-server")
        options += ["--no-repack", "--no-warmup", "--port", str(port), "-np", str(_SEQUENCES)]
        options += ["-c", str(context), "--no-webui", "--host", "127.0.0.1"]
        numbers = torch.Generator().manual_seed(2)
        prompts = torch.randint(31000, (_SEQUENCES, prompt), generator=numbers).tolist()
        ask = partial(servers.completed, f"http://127.0.0.1:{port}", tokens=tokens)
        running = servers.process([tool, *options], port, join=self._group.join)
        with running, ThreadPoolExecutor(_SEQUENCES) as pool:
            found = list(pool.map(ask, prompts))
        # The first token comes of the prompt.
        count = sum(one["predicted_n"] - 1 for one in found)
        return count / max(one["predicted_ms"] / 1e3 for one in found)

    def _llama(self, tool: str) -> list[str]:
        return [
            str(native.built(tool)),
            "-m",
            str(self.gguf),
            "-t",
            str(self._threads),
            "-lm",
            "mmap",
        ]

    def _forget(self) -> None:
        """Have no page of either model in memory."""
        forget(self.checkpoint.parent)
        forget(self.checkpoint)


def write_both(folder: Path, layers: int) -> None:
    """Write the checkpoint and the GGUF file of the same weights into `folder`.

    Raises ArgumentError where the disk has no room for them.
    """
    free, needed = shutil.disk_usage(folder).free, 2 * (layers * _LAYER_BYTES + (256 << 20))
    if free < needed + (2 << 30):
        raise ArgumentError(
            f"{folder}: {format_size(needed)} are written, and {format_size(free)} are free"
        )
    config = QWEN3_MOE | {"num_hidden_layers": layers}
    twin = RandomGguf(folder / "model.gguf", config)
    embedding = config["hidden_size"] ** 0.5
    with torch_threads(1):
        write_random_checkpoint(folder / "checkpoint", config, embedding=embedding, twin=twin)
    twin.close()


@dataclass
class Contested:
    """What was measured so far. settings: what it depends on. seconds: that samples took.

    path: the file that it is kept in, and goes on from; None: none.
    """

    settings: dict[str, Any]
    path: Path | None = None
    samples: dict[str, list[Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        kept = read_object(self.path)
        if kept["settings"] != self.settings:
            raise ArgumentError(f"{self.path}: holds samples of other settings; name another file")
        self.samples, self.seconds = kept["samples"], kept["seconds"]

    def take(
        self, takes: Mapping[str, Callable[[], Any]], rounds: int, left: Callable[[], float]
    ) -> bool:
        """Sample all in turn, at least once, as long as there is time; whether there are `rounds`.

        left: seconds that there are. What takes how long is known when it has been taken.
        """
        taken = 0
        for count in range(rounds):
            for name, take in takes.items():
                found = self.samples.setdefault(name, [])
                if len(found) > count:
                    continue
                if taken and self.seconds.get(name, math.inf) > left():
                    return False
                start = time.perf_counter()
                found.append(take())
                taken += 1
                took = time.perf_counter() - start
                self.seconds[name] = max(took, self.seconds.get(name, 0.0))
                print(f"{name}: {took:.0f} s", flush=True)
                self._keep()
        return True

    def _keep(self) -> None:
        if self.path is not None:
            kept = {"settings": self.settings, "samples": self.samples, "seconds": self.seconds}
            replace_text(self.path, json.dumps(kept, indent=1))


def report(found: dict[str, list[Any]], settings: dict[str, Any]) -> Report:
    """The table, and the bars."""
    keys = {"one": "tokens_per_s", "many": "decode_tokens_per_s"}
    result = Report(
        "experts_peers",
        settings,
        "a mixture of experts larger than memory; tokens per second, medians; of the disk: bytes "
        "read a second, of what O_DIRECT reads of whole files get in the same process; at all "
        "of it: times llama.cpp at that rate",
        ("sequences", "llama.cpp", "qoff", "times", "read", "of the disk", "at all of it"),
        measured=found,
    )
    for name, key in keys.items():
        ours = statistics.median(one[key] for one in found[f"qoff, {name}"])
        theirs = statistics.median(found[f"llama.cpp, {name}"])
        read = statistics.median(one["read_bytes_per_s"] for one in found[f"qoff, {name}"])
        of_disk = statistics.median(
            one["read_bytes_per_s"] / one["raw_bytes_per_s"] for one in found[f"qoff, {name}"]
        )
        count = "1" if name == "one" else str(_SEQUENCES)
        result.rows.append(
            (
                count,
                f"{theirs:.3f}",
                f"{ours:.2f}",
                f"{ours / theirs:.1f}",
                f"{read / 1e9:.2f} GB/s",
                f"{100 * of_disk:.0f} %",
                f"{ours / theirs / of_disk:.1f}",
            )
        )
        result.bars.append(Bar(f"times llama.cpp, {count}", BARS[name], ours / theirs))
        result.bars.append(Bar(f"of the disk's bandwidth, {count}", DISK_BAR, of_disk))
    return result


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 layers, 1 GiB, one round")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--limit", default="2GiB", help="of the control group")
    parser.add_argument("--path", type=Path, help="folder of both files, written if not there")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16, help="of one sequence")
    parser.add_argument("--steps", type=int, default=3, help="of 64 sequences, in llama.cpp")
    parser.add_argument("--samples", type=Path, help="JSON file of samples, to go on from")
    parser.add_argument("--minutes", type=float, default=math.inf, help="that this part may take")
    parser.add_argument("--out", type=out_file, help="JSON file; default in bench/results")
    given = parser.parse_args()
    if given.quick:
        given.layers, given.limit, given.rounds, given.tokens, given.steps = 3, "1GiB", 1, 4, 2
    if given.steps < 2:
        parser.error("--steps is 2 or more: the first of them is not counted")
    if given.minutes < math.inf and None in (given.path, given.samples):
        parser.error("--minutes takes a part of a run, which --path and --samples keep")
    limit, threads = parse_size(given.limit), len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        folder = given.path or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "checkpoint" / "config.json").exists():
            write_both(folder, given.layers)
            print(f"both files: {time.monotonic() - start:.0f} s", flush=True)
            if given.minutes < math.inf:
                return
        size = sum(file.nbytes for file in Checkpoint.open(folder / "checkpoint").files)
        print(f"{format_size(size)} of weights in {format_size(limit)}", flush=True)
        group = stack.enter_context(control_group(limit))
        both = Contest(folder, group, limit - _BESIDE, threads)
        settings = {"weights": size, "limit": limit, "threads": threads}
        settings |= {"tokens": given.tokens, "steps": given.steps}
        found = Contested(settings, given.samples)
        takes: dict[str, Callable[[], Any]] = {
            "llama.cpp, one": lambda: both.llama_one(4, given.tokens),
            "qoff, one": lambda: both.qoff("one", 4, given.tokens),
            "llama.cpp, many": lambda: both.llama_many(1, given.steps),
            "qoff, many": lambda: both.qoff("many", 1, 2 * given.steps),
        }
        end = start + 60 * given.minutes
        if not found.take(takes, given.rounds, lambda: end - time.monotonic()):
            print(f"{given.samples}: not all samples are there yet; run it again", flush=True)
            return
    report(found.samples, settings | {"rounds": given.rounds}).publish(given.out)


if __name__ == "__main__":
    main()
