"""A random 1.1B-parameter model that streams from disk, within a fifth of its size of memory.

Beside it, in turn: reading the same files with O_DIRECT and nothing else, the same model with all
weights resident, and accelerate's `disk_offload` of the same shape in bfloat16.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.bandwidth import RawRead
from bench.greedy import Greedy
from bench.harness import Bar, Report, arguments
from bench.peers.accelerate_offload import Offloaded, storage_bytes
from bench.random_model import SMALL, TINYLLAMA, write_random_checkpoint
from bench.sampling import interleaved, torch_threads
from qoff.checkpoint import Checkpoint
from qoff.measure.samples import Samples
from qoff.models.runtime import Runtime
from qoff.units import format_size

MODEL_OVER_BUDGET = 5
_PROMPT = 8
READ, STREAM, RESIDENT, COLD, WARM = (
    "O_DIRECT read alone",
    "qoff, streaming",
    "qoff, all resident",
    "accelerate, page cache dropped",
    "accelerate, from page cache",
)


@dataclass
class Decode:
    """One runtime's decode in samples of `tokens` tokens: tokens per second, and the disk's part.

    A sample starts and ends right after a token, with the same reads under way.
    """

    runtime: Runtime
    tokens: int
    busy: list[float] = field(default_factory=list)  # of each sample's wall time
    disk_rate: list[float] = field(default_factory=list)  # bytes per second
    waiting: list[float] = field(default_factory=list)  # of each sample's wall time
    token_bytes: list[float] = field(default_factory=list)  # read for each token

    @torch.inference_mode()
    def __call__(self) -> float:
        prompt = torch.arange(1, 1 + _PROMPT)[None]
        with torch_threads(1):
            greedy = Greedy(self.runtime, prompt, self.tokens + 2)
            greedy.step()
            start, before = time.perf_counter(), self.runtime.stats()
            for _ in range(self.tokens):
                greedy.step()
            after, wall = self.runtime.stats(), time.perf_counter() - start
        nbytes = after.disk_bytes - before.disk_bytes
        self.busy.append((after.disk_busy_s - before.disk_busy_s) / wall)
        self.waiting.append((after.wait_s - before.wait_s) / wall)
        self.disk_rate.append(nbytes / wall)
        self.token_bytes.append(nbytes / self.tokens)
        return self.tokens / wall


@dataclass
class Peer:
    """accelerate's decode, a token a sample: tokens per second, and bytes it read from storage."""

    model: Offloaded
    drop: bool
    storage: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        if self.drop:
            self.model.drop_page_cache()
        else:
            self.model.token()  # fills the page cache
        before = storage_bytes()
        seconds = self.model.token()
        self.storage.append(float(storage_bytes() - before))
        return 1 / seconds


def measure(folder: Path, config: dict[str, Any], rounds: int, tokens: int) -> Report:
    """Write both models into `folder` and measure them in turn."""
    path = folder / "qoff"
    write_random_checkpoint(path, config)
    checkpoint = Checkpoint.open(path)
    model_bytes = sum(f.nbytes for f in checkpoint.files)
    with ExitStack() as stack:
        raw = RawRead(checkpoint)
        stack.callback(raw.reader.close)
        budget = model_bytes // MODEL_OVER_BUDGET
        streaming = Decode(stack.enter_context(Runtime(path, device_memory=budget)), tokens)
        resident = Decode(stack.enter_context(Runtime(path)), tokens)
        offloaded = Offloaded(config, folder / "accelerate")
        cold, warm = Peer(offloaded, drop=True), Peer(offloaded, drop=False)
        calls: dict[str, Callable[[], float]] = {
            READ: raw, STREAM: streaming, RESIDENT: resident, COLD: cold, WARM: warm
        }  # fmt: skip
        for call in calls.values():
            call()  # compiles, allocates, and compares each file with its checksum
        for noted in _series(streaming, cold, warm).values():
            noted.clear()
        found = interleaved(calls, rounds)
        direct = not raw.reader.stats.buffered_files
        capacity = streaming.runtime.stats().arena_capacity
    settings = {
        "rounds": rounds, "tokens": tokens, "config": config, "model_bytes": model_bytes,
        "device_memory": budget, "arena_bytes": capacity, "o_direct": direct,
        "accelerate_bytes": offloaded.nbytes,
    }  # fmt: skip
    series = {name: Samples(tuple(v)) for name, v in _series(streaming, cold, warm).items()}
    return report(found, series, settings)


def _series(streaming: Decode, cold: Peer, warm: Peer) -> dict[str, list[float]]:
    """What the alternatives noted beside their rates."""
    return {
        "disk_busy": streaming.busy,
        "waiting": streaming.waiting,
        "disk_bytes_per_s": streaming.disk_rate,
        "disk_bytes_per_token": streaming.token_bytes,
        COLD: cold.storage,
        WARM: warm.storage,
    }


def report(
    found: dict[str, Samples], series: dict[str, Samples], settings: dict[str, Any]
) -> Report:
    """Return the table, ratios and bars."""
    result = Report(
        "disk_stream",
        settings,
        f"random model, {format_size(settings['model_bytes'])} in 4 bits, streaming within "
        f"{format_size(settings['arena_bytes'])}",
        ("", "tokens/s", "spread", "disk GB/s", "disk MB a token", "disk busy", "x streaming"),
        unit="per second",
    )
    stream, read = found[STREAM].median, found[READ]
    disk = series["disk_bytes_per_s"]
    result.rows.append((READ, "-", f"{read.spread:.0%}", _giga(read.median), "-", "-", "-"))
    for name in (STREAM, RESIDENT, COLD, WARM):
        rate = found[name]
        token_bytes, busy = 0.0, "-"
        if name == STREAM:
            token_bytes, busy = series["disk_bytes_per_token"].median, _part(series["disk_busy"])
        elif name in series:
            token_bytes = series[name].median
        result.rows.append(
            (name, f"{rate.median:.2f}", f"{rate.spread:.0%}", _giga(token_bytes * rate.median),
             f"{token_bytes / 1e6:.0f}", busy, f"{rate.median / stream:.2f}")
        )  # fmt: skip
    result.measured = {name: samples.summary() for name, samples in found.items()}
    result.measured["beside"] = {
        name if name not in found else f"{name}, storage bytes": _values(samples)
        for name, samples in series.items()
    }
    result.ratios = {
        "disk rate / O_DIRECT rate": disk.median / read.median,
        **{f"{STREAM} / {name}": stream / found[name].median for name in (RESIDENT, COLD, WARM)},
    }
    result.bars = [
        Bar("disk busy, of decode time", 0.95, series["disk_busy"].median),
        Bar("disk rate / O_DIRECT rate", 0.95, disk.median / read.median),
        Bar(f"{STREAM} / {COLD}", 3.0, stream / found[COLD].median),
    ]
    result.notes = [
        f"waiting for the disk {_part(series['waiting'])} of decode time; files "
        f"{'read with O_DIRECT' if settings['o_direct'] else 'BUFFERED: no O_DIRECT here'}; "
        f"accelerate has {settings['accelerate_bytes'] / 1e9:.2f} GB in bfloat16"
    ]
    return result


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.2f}"


def _part(samples: Samples) -> str:
    return f"{samples.median:.1%}"


def _values(samples: Samples) -> dict[str, Any]:
    return {"median": samples.median, "values": samples.values}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__,
        argv,
        keep=(bool, False, "leave the models on disk"),
        folder=(Path, None, "where to write the models (4 GB); default the temporary folder"),
    )
    config, rounds, tokens = (SMALL, 2, 4) if args.quick else (TINYLLAMA, 9, 8)
    folder = Path(tempfile.mkdtemp(prefix="qoff-disk-stream-", dir=args.folder))
    try:
        result = measure(folder, config, rounds, tokens)
    finally:
        if args.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder)
    result.settings["quick"] = args.quick
    result.publish(args.out)


if __name__ == "__main__":
    main()
