"""Training a model of 1.1 billion weights in a control group that is far too small for it.

A random model in TinyLlama's shape. `full` trains all weights (bfloat16, with float32 masters and
moments on disk: 16 bytes a weight with gradients) in 3 GiB. Beside a step stands its bound: the
disk's bytes at the rate of reads and writes alone, or the arithmetic, whichever takes longer. That
is torch's products of the same shapes alone, with one more forward as layers are computed again,
its attention, and the optimizer on memory. DeepSpeed's ZeRO-3 with weights and states on disk
trains the same where `bench.peers deepspeed` has installed it (its async_io needs `libaio-dev`), in
a larger control group if it is killed in this one. `adapters` trains LoRA beside its 4-bit weights
from disk in 1 GiB, and the same in memory without a limit. `tiles` trains all weights of one layer
of hidden size 16,384 or more, embedding and head, each of whose large matrices has 512 MiB, with
256 MiB of device memory.

Every run is a process of its own in a control group (v1, so this needs root) that counts cached
pages, too, and kills what takes more.

    python -m bench.train_large full                      # 40 GB of disk
    python -m bench.train_large adapters --tokens 512 --micro-batches 128
    python -m bench.train_large tiles --tokens 64         # 35 GB of disk
    python -m bench.train_large tiles --tokens 16 --hidden 65536
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.control_group import control_group, forget, status_bytes
from bench.harness import Bar, Report, out_file
from bench.random_model import SMALL, TINYLLAMA, write_random_checkpoint
from bench.train_bound import bound
from bench.train_steps import adapted, random_model
from bench.train_zero3 import zero3
from qoff import train
from qoff.units import format_size, parse_size

_HIDDEN = 16384, 32768, 65536
_LIMITS = {"full": "3GiB", "adapters": "1GiB", "tiles": "1GiB"}
_TILED_MEMORY = 256 << 20
_LARGEST = 1 << 28  # elements of a matrix in tiles
_FOLDERS = {"full": "float", "adapters": "packed", "tiles": "float"}
_FULL_BAR, _ADAPTERS_BAR = 0.8, 0.9


def batches_of(config: dict[str, Any], tokens: int, count: int) -> list[dict[str, Tensor]]:
    """Random micro-batches of a step."""
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(3, config["vocab_size"], (count, 1, tokens), generator=numbers)
    return [{"input_ids": x, "labels": x} for x in ids]


def trained(given: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps, bytes to and from disk of one, and bytes of each tier."""
    options: dict[str, Any] = {"host_memory": 0, "disk": given.path}
    if given.what != "adapters":
        model: Any = given.path / "float"
    else:
        from transformers import AutoModelForCausalLM

        where = {} if given.in_memory else {"device_map": "disk"}
        model = adapted(AutoModelForCausalLM.from_pretrained(given.path / "packed", **where))
        options = {} if given.in_memory else options | {"device_memory": given.device_memory}
    tiled = given.what == "tiles"
    if tiled:
        options["device_memory"] = _TILED_MEMORY >> (2 * given.quick)
    start = time.perf_counter()
    training = train.offload(
        model,
        train.AdamW(lr=1e-5, bits=8 if tiled else 32),
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
        "rss": status_bytes("VmHWM"),
        "bound": options.get("device_memory"),
        "weights": sum(p.numel() * p.itemsize for p in training.model.parameters()),
        "largest": max(p.numel() * p.itemsize for p in training.model.parameters()),
    }


def write(given: argparse.Namespace, config: dict[str, Any]) -> None:
    """The random model."""
    if given.what != "adapters":
        random_model(config, torch.bfloat16).save_pretrained(given.path / "float")
    else:
        write_random_checkpoint(given.path / "packed", config)


def _child(given: argparse.Namespace, part: str, *more: str) -> list[str]:
    names = ("path", "layers", "tokens", "micro_batches", "steps", "device_memory", "hidden")
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


def _tiles(given: argparse.Namespace, run: Callable[..., Any], result: Report) -> None:
    forget(given.path / "float")
    found = run(parse_size(given.limit), "train")
    moved = found["moved"]
    result.measured["step"] = found
    result.rows += [
        ("device memory", format_size(found["device"]), f"of {format_size(found['bound'])}"),
        ("memory at its peak", format_size(found["peak"]), f"of {given.limit}"),
        ("weights", format_size(found["weights"]), f"{format_size(found['largest'])} the largest"),
        ("a step", f"{min(found['seconds']):.1f} s", f"{given.tokens} tokens"),
        ("read", format_size(sum(n for name, n in moved.items() if name.endswith("read"))), ""),
    ]
    within = found["bound"] / found["device"]
    result.bars.append(Bar("device memory over what is used", 1.0, within))
    share = found["largest"] / found["bound"]
    result.bars.append(Bar("the largest matrix over device memory", 1.0, share))


def shape(given: argparse.Namespace) -> dict[str, Any]:
    """The config of what is trained."""
    if given.what != "tiles":
        return (SMALL if given.quick else TINYLLAMA) | {"num_hidden_layers": given.layers}
    hidden = 1024 if given.quick else given.hidden
    other = (_LARGEST >> (8 * given.quick)) // hidden
    return TINYLLAMA | {
        "hidden_size": hidden,
        "intermediate_size": other,
        "num_attention_heads": other // 128,
        "head_dim": 128,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": other,
    }


KINDS = {"full": _full, "adapters": _adapters, "tiles": _tiles}


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
    made.add_argument(
        "--hidden", type=int, default=16384, choices=_HIDDEN, help="of what is trained in tiles"
    )
    made.add_argument(
        "--device-memory",
        default="96MiB",
        help="of adapters from disk: where hidden states of all micro-batches do not fit, they "
        "are on disk, too",
    )
    made.add_argument("--steps", type=int, default=1, help="the fastest counts")
    made.add_argument(
        "--peer-limits",
        nargs="*",
        default=["8GiB", "16GiB"],
        metavar="SIZE",
        help="of control groups for DeepSpeed, where it is killed in `--limit`",
    )
    made.add_argument("--peer-minutes", type=float, default=25, help="of DeepSpeed in all; 0: none")
    made.add_argument("--out", type=out_file, help="JSON file; default in bench/results")
    made.add_argument("--part", help=argparse.SUPPRESS)
    made.add_argument("--moved", type=json.loads, help=argparse.SUPPRESS)
    made.add_argument("--in-memory", action="store_true", help=argparse.SUPPRESS)
    return made


def main() -> None:
    given = parser().parse_args()
    given.limit = given.limit or _LIMITS[given.what]
    config = shape(given)
    if given.part:
        parts = {
            "write": write,
            "train": trained,
            "bound": lambda *_: bound(
                config, given.tokens, given.micro_batches, given.moved, given.path
            ),
        }
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

        if not (folder / _FOLDERS[given.what] / "config.json").exists():
            run(None, "write")
        settings = {k: v for k, v in vars(given).items() if k not in ("path", "out", "part")}
        result = Report(
            f"train_large-{given.what}",
            settings | {"config": config, "threads": len(os.sched_getaffinity(0))},
            f"{given.what}, in {given.limit}",
            ("", "", ""),
        )
        KINDS[given.what](given, run, result)
        if given.what == "full" and given.peer_minutes:
            zero3(given, batches_of(config, given.tokens, given.micro_batches), result)
        result.publish(given.out)


if __name__ == "__main__":
    main()
