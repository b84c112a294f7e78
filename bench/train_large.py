"""Training a model of 1.1 billion weights in a control group that is far too small for it.

A random model in TinyLlama's shape. `full` trains all weights (bfloat16, with float32 masters and
moments on disk: 16 bytes a weight with gradients) in 3 GiB. Beside a step stands its bound: the
disk's bytes at the rate of reads and writes alone, or the arithmetic, whichever takes longer. That
is torch's products of the same shapes alone, with one more forward as layers are computed again,
its attention, and the optimizer on memory. `adapters` trains LoRA beside its 4-bit weights from
disk in 1 GiB, and the same in memory without a limit.

Every run is a process of its own in a control group (v1, so this needs root) that counts cached
pages, too, and kills what takes more.

    python -m bench.train_large full                      # 40 GB of disk
    python -m bench.train_large adapters --micro-batches 8
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.control_group import control_group, forget
from bench.harness import Bar, Report
from bench.random_model import SMALL, TINYLLAMA, write_random_checkpoint
from bench.sampling import timed
from bench.train_steps import adapted, random_model
from qoff import train
from qoff.kernels.cpu.optim.update import Moments, Rule, update
from qoff.memory.arena import map_pages
from qoff.train.homes import Homes
from qoff.train.layout import PIECE
from qoff.train.updates import BUFFERS
from qoff.units import format_size, parse_size

_ADAM = Rule("adam", 1e-3, 0.9, 0.999, keep=1 - 1e-5, root=1.1, eps=1e-8)
_PROBE = 2 << 30  # bytes that are read and written to measure the disk
_LIMITS = {"full": "3GiB", "adapters": "1GiB"}
_FULL_BAR, _ADAPTERS_BAR = 0.8, 0.9


def batches_of(config: dict[str, Any], tokens: int, count: int) -> list[dict[str, Tensor]]:
    """Random micro-batches of a step."""
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(3, config["vocab_size"], (count, 1, tokens), generator=numbers)
    return [{"input_ids": x, "labels": x} for x in ids]


def trained(given: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps, bytes to and from disk of one, and bytes of each tier."""
    options: dict[str, Any] = {"host_memory": 0, "disk": given.path}
    if given.what == "full":
        model: Any = given.path / "float"
    else:
        from transformers import AutoModelForCausalLM

        where = {} if given.in_memory else {"device_map": "disk"}
        model = adapted(AutoModelForCausalLM.from_pretrained(given.path / "packed", **where))
        if given.in_memory:
            options = {}
    start = time.perf_counter()
    training = train.offload(
        model,
        train.AdamW(lr=1e-5),
        tokens=given.tokens,
        micro_batches=given.micro_batches,
        **options,
    )
    began = time.perf_counter() - start
    batches, seconds, losses = batches_of(config, given.tokens, given.micro_batches), [], []
    for step in range(given.steps + 1):  # one more, that compiles kernels
        few = [{k: x[:, :64] for k, x in batches[0].items()}] if step == 0 else batches
        before, start = training.stats, time.perf_counter()
        losses.append(training.step(few))
        seconds.append(time.perf_counter() - start)
    after = training.stats
    moved = {name: n - before.moved.get(name, 0) for name, n in after.moved.items()}
    moved["frozen weights read"] = after.frozen_read - before.frozen_read
    return {
        "began_s": began,
        "seconds": seconds[1:],
        "losses": losses[1:],
        "moved": moved,
        "wait_s": after.wait_s - before.wait_s,
        "device": after.device_peak,
        "host": after.host_peak,
        "rss": _peak_rss(),
    }


def bound(given: argparse.Namespace, config: dict[str, Any], moved: dict[str, int]) -> Any:
    """Seconds of a step's parts, each alone: products, attention, optimizer, disk."""
    tokens, count, layers = given.tokens, given.micro_batches, config["num_hidden_layers"]
    hidden, wide, heads = (
        config[f"{name}"] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    size = hidden // heads
    kv = config["num_key_value_heads"] * size
    shapes = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)]
    each = {shape: _products(shape, tokens) for shape in {*shapes}}
    products = layers * sum(2 * each[s][0] + each[s][1] + each[s][2] for s in shapes)
    products += sum(_products((config["vocab_size"], hidden), tokens))
    attention = layers * _attention(tokens, heads, size, config["num_key_value_heads"])
    weights = layers * sum(n * k for n, k in shapes) + 2 * config["vocab_size"] * hidden
    read, written = (sum(n for name, n in moved.items() if name.endswith(x)) for x in _WAYS)
    rate = _disk_rate(given.path)
    return {
        "products_s": count * products,
        "attention_s": count * attention,
        "optimizer_s": weights / _optimizer_rate(),
        "disk_s": max(read, written) / rate,
        "disk_rate": rate,
        "weights": weights,
    }


_WAYS = ("read", "written")


def _products(shape: tuple[int, int], tokens: int) -> list[float]:
    """Seconds of forward, gradient of the input and of the weights, in bfloat16."""
    n, k = shape
    x, w, y = (torch.randn(s, dtype=torch.bfloat16) for s in ((tokens, k), (n, k), (tokens, n)))
    return [_least(lambda: x @ w.t()), _least(lambda: y @ w), _least(lambda: y.t() @ x)]


def _attention(tokens: int, heads: int, size: int, kv_heads: int) -> float:
    """Seconds of a layer's attention: forward twice, and backward."""
    q = torch.randn(1, heads, tokens, size, dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(1, kv_heads, tokens, size, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )

    def run() -> Tensor:
        wide = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        return functional.scaled_dot_product_attention(q, *wide, is_causal=True)

    def both() -> None:
        run().sum().backward()

    with torch.no_grad():
        forward = _least(run)
    return forward + _least(both)


def _least(call: Callable[[], object]) -> float:
    measure = timed(call, 0.0)
    return min(measure() for _ in range(3))


def _optimizer_rate() -> float:
    """Weights per second of Adam on memory, with bfloat16 copies."""
    n = 16 * PIECE
    master, first, second, grad = (
        map_pages(4 * n).view(torch.float32).fill_(1e-3) for _ in range(4)
    )
    copy = map_pages(2 * n).view(torch.bfloat16).fill_(1e-3)
    return n / _least(lambda: update(_ADAM, master, grad, Moments(first, second), copy))


def _disk_rate(folder: Path) -> float:
    """Bytes per second, each way, of what passes through buffers as states do, unchanged."""
    size = 12 * PIECE
    homes = Homes(BUFFERS * size, 0, _PROBE // size * size, folder)
    try:
        places = [homes.home("probe", size, False) for _ in range(_PROBE // size)]
        free = [homes.device.alloc(size, "probe") for _ in range(BUFFERS)]
        for place in places:
            homes.write(place, free[0], lambda: None).result()
        start = time.perf_counter()
        reads, writes = [], []
        for i, place in enumerate(places):
            if len(writes) == 2:
                write, buffer = writes.pop(0)
                write.result()
                free.append(buffer)
            for ahead in places[i + len(reads) : i + 2]:
                if free:
                    buffer = free.pop()
                    reads.append((homes.read(ahead, buffer), buffer))
            read, buffer = reads.pop(0)
            read.result()
            writes.append((homes.write(place, buffer, lambda: None), buffer))
        for write, _ in writes:
            write.result()
        return len(places) * size / (time.perf_counter() - start)
    finally:
        homes.close()


def _peak_rss() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("VmHWM:"))


def write(given: argparse.Namespace, config: dict[str, Any]) -> None:
    """The random model."""
    if given.what == "full":
        random_model(config, torch.bfloat16).save_pretrained(given.path / "float")
    else:
        write_random_checkpoint(given.path / "packed", config)


def _child(given: argparse.Namespace, part: str, *more: str) -> list[str]:
    names = ("path", "layers", "tokens", "micro_batches", "steps")
    sizes = [f"--{name.replace('_', '-')}={getattr(given, name)}" for name in names]
    quick = ["--quick"] if given.quick else []
    return [
        sys.executable,
        "-m",
        "bench.train_large",
        given.what,
        *sizes,
        "--part",
        part,
        *quick,
        *more,
    ]


def _full(given: argparse.Namespace, run: Callable[..., Any], result: Report) -> None:
    limit = parse_size(given.limit)
    forget(given.path / "float")
    found = run(limit, "train")
    alone = run(limit, "bound", "--moved", json.dumps(found["moved"]))
    seconds = min(found["seconds"])
    cpu = alone["products_s"] + alone["attention_s"] + alone["optimizer_s"]
    least = max(cpu, alone["disk_s"])
    tokens = given.tokens * given.micro_batches
    result.measured |= {"step": found, "alone": alone, "bound_s": least}
    result.ratios |= {"of the bound": least / seconds}
    result.rows += [
        ("a step", f"{seconds:.1f} s", f"{tokens / seconds:.1f} tokens/s"),
        ("bound", f"{least:.1f} s", f"{least / seconds:.2f} of the step's rate"),
        ("  products", f"{alone['products_s']:.1f} s", ""),
        ("  attention", f"{alone['attention_s']:.1f} s", ""),
        ("  optimizer", f"{alone['optimizer_s']:.1f} s", ""),
        ("  disk", f"{alone['disk_s']:.1f} s", f"{alone['disk_rate'] / 1e9:.2f} GB/s each way"),
        ("memory at its peak", format_size(found["peak"]), f"of {given.limit}"),
        ("weights and states", format_size(16 * alone["weights"]), "16 bytes a weight"),
    ]
    result.bars.append(Bar("full training over its bound", _FULL_BAR, least / seconds))


def _adapters(given: argparse.Namespace, run: Callable[..., Any], result: Report) -> None:
    forget(given.path / "packed")
    tokens = given.tokens * given.micro_batches
    found = {
        "in memory": run(None, "train", "--in-memory"),
        f"from disk, in {given.limit}": run(parse_size(given.limit), "train"),
    }
    rates = [tokens / min(one["seconds"]) for one in found.values()]
    for (name, one), rate in zip(found.items(), rates, strict=True):
        peak = format_size(one["peak"]) if one["peak"] else ""
        result.rows.append((name, f"{rate:.1f} tokens/s", peak))
        result.measured[name] = one
    result.ratios["from disk over in memory"] = rates[1] / rates[0]
    result.notes.append(f"{tokens:,} tokens a step")
    result.bars.append(Bar("adapters from disk over in memory", _ADAPTERS_BAR, rates[1] / rates[0]))


KINDS = {"full": _full, "adapters": _adapters}


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("what", choices=_LIMITS, help="what learns")
    made.add_argument("--quick", action="store_true", help="a small model")
    made.add_argument("--layers", type=int, default=22, help="of 22")
    made.add_argument("--limit", help="of the control group")
    made.add_argument("--path", type=Path, help="folder of models and states, kept")
    made.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    made.add_argument("--micro-batches", type=int, default=1)
    made.add_argument("--steps", type=int, default=1, help="the fastest counts")
    made.add_argument("--out", type=Path, help="JSON file; default in bench/results")
    made.add_argument("--part", help=argparse.SUPPRESS)
    made.add_argument("--moved", type=json.loads, help=argparse.SUPPRESS)
    made.add_argument("--in-memory", action="store_true", help=argparse.SUPPRESS)
    return made


def main() -> None:
    given = parser().parse_args()
    given.limit = given.limit or _LIMITS[given.what]
    config = (SMALL if given.quick else TINYLLAMA) | {"num_hidden_layers": given.layers}
    if given.part:
        parts = {"write": write, "train": trained, "bound": partial(bound, moved=given.moved)}
        print(json.dumps(parts[given.part](given, config)))
        return
    with ExitStack() as stack:
        folder = given.path or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        given.path = folder
        folder.mkdir(parents=True, exist_ok=True)

        def run(limit: int | None, part: str, *more: str) -> Any:
            with control_group(limit) as group:
                out = group.output(_child(given, part, *more)).splitlines()[-1]
                found = json.loads(out)
                return found if found is None else found | {"peak": group.peak if limit else None}

        if not (folder / ("float" if given.what == "full" else "packed") / "config.json").exists():
            run(None, "write")
        settings = {k: v for k, v in vars(given).items() if k not in ("path", "out", "part")}
        result = Report(
            f"train_large-{given.what}",
            settings | {"config": config, "threads": len(os.sched_getaffinity(0))},
            f"{given.what}: 1.1 billion weights in {given.limit}",
            ("", "", ""),
        )
        KINDS[given.what](given, run, result)
        result.publish(given.out)


if __name__ == "__main__":
    main()
