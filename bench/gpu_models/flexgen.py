"""FlexGen's command lines as plans of qoff's.

The flags are those of `flexgen.flex_opt` in the package flexgen 0.1.8; abbreviations that argparse
takes (`--cpu` for `--cpu-cache-compute`) are understood, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from qoff.budgets import resolve_dtype
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.kvcache import KVPlacement, KVQuant
from qoff.memory.arena import PAGE
from qoff.models.native.caches import head_shapes
from qoff.models.spec import DecoderSpec
from qoff.plan import Memory, Plan

PASS_TOKENS = 4096  # of prompts in a pass, at most
_STAGING_BUFFERS, _SLOT_PAGES = 2, 4
_POLICY = (100, 0, 100, 0, 100, 0)
_TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Translated:
    """A command line: model, plan, prompt and answer in tokens.

    inexact: a line for each flag that a plan cannot express, with what qoff does instead.
    """

    model: str
    plan: Plan
    prompt: int
    new: int
    inexact: tuple[str, ...]


def plan_of(
    command: str,
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    prefill_tokens: int = PASS_TOKENS,
) -> Translated:
    """The plan of a command line for a checkpoint of the model.

    Percentages of weights become bounds: of the device so much of the files beside what the plan
    takes for everything else and two slots, of the host the same. prefill_tokens: the most of a
    pass. Raises ArgumentError for what is no command line of FlexGen's.
    """
    flags = _parse(command)
    weights, cache, hidden = (_percent(flags.percent[i : i + 2]) for i in (0, 2, 4))
    if max(hidden) < 100:
        raise ArgumentError(
            f"activations {hidden[0]} % on the GPU and {hidden[1]} % on the CPU: they lie on one "
            "tier, here and in FlexGen; use 100 0, 0 100 or 0 0"
        )
    on_gpu = torch.device(device).type != "cpu"
    top = 1.0 if on_gpu and cache[0] < 100 else flags.attn_sparsity
    plan = Plan(
        batch_size=flags.gpu_batch_size,
        batches=flags.num_gpu_batches,
        context=flags.prompt_len + flags.gen_len,
        prefill_tokens=min(prefill_tokens, flags.gpu_batch_size * flags.prompt_len),
        kv=KVQuant(window=0, attention_top=top),
        kv_placement=KVPlacement(cache[0] / 100, cache[1] / 100),
        cpu_attention="always" if flags.cpu_cache_compute else "never",
        activations=_TIERS[hidden.index(100)],  # type: ignore[arg-type]
        spill_folder=flags.offload_dir,
    )
    plan = _bounded(plan, weights, checkpoint, torch.device(device))
    inexact = tuple(_inexact(flags, top))
    return Translated(flags.model, plan, flags.prompt_len, flags.gen_len, inexact)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"not a command line of FlexGen's: {message}")


def _switch(text: str) -> bool:
    known = {"yes": True, "true": True, "t": True, "y": True, "1": True}
    known |= {"no": False, "false": False, "f": False, "n": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]


def _parse(command: str) -> argparse.Namespace:
    parser = _Parser(add_help=False)
    parser.add_argument("--model", default="facebook/opt-6.7b")
    parser.add_argument("--percent", nargs=6, type=int, default=_POLICY)
    for name, default in (("prompt-len", 512), ("gen-len", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("gpu-batch-size", 4), ("num-gpu-batches", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("overlap", "sep-layer", "pin-weight"):
        parser.add_argument(f"--{name}", type=_switch, nargs="?", const=True, default=True)
    for name in ("compress-weight", "compress-cache", "cpu-cache-compute"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--attn-sparsity", type=float, default=1.0)
    parser.add_argument("--offload-dir", type=Path)
    # How FlexGen measures and where it finds its weights: nothing of a plan.
    for name in ("path", "cut-gen-len", "debug-mode", "log-file", "verbose"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--no-log", action="store_true")
    return parser.parse_args(command.split())


def _percent(two: list[int]) -> tuple[int, int, int]:
    """Of the GPU, the CPU and the disk."""
    gpu, cpu = two
    if min(gpu, cpu) < 0 or gpu + cpu > 100:
        raise ArgumentError(f"--percent: {gpu} % and {cpu} %; use 0 or more, together at most 100")
    return gpu, cpu, 100 - gpu - cpu


def _inexact(flags: argparse.Namespace, top: float) -> Iterator[str]:
    if not flags.compress_weight:
        yield "no --compress-weight: weights have the bits of the checkpoint"
    if not flags.compress_cache:
        yield "no --compress-cache: the KV cache has 4 bits"
    if not flags.overlap:
        yield "--overlap False: moves and computation always overlap"
    if flags.sep_layer:
        yield "--sep-layer: a layer is one unit, and a matrix in tiles where two do not fit"
    if not flags.pin_weight:
        yield "--pin-weight False: host memory beside a GPU is pinned"
    if top != flags.attn_sparsity:
        yield "--attn-sparsity: beside a GPU, offloaded blocks are all attended to"
    if flags.gpu_batch_size * flags.prompt_len > PASS_TOKENS:
        yield f"a GPU batch of prompts in one pass: pieces of {PASS_TOKENS} tokens"


def _bounded(
    plan: Plan, weights: tuple[int, int, int], checkpoint: Checkpoint, device: torch.device
) -> Plan:
    """The plan with the bounds that leave this much of the weights on device and host."""
    on_device, on_host, _ = weights
    if on_device == 100:
        return plan
    memory = _memory(plan, checkpoint, device)
    files = checkpoint.files
    total = sum(file.nbytes for file in files)
    pages = PAGE * sum(len(file.weights) for file in files)  # reads are of whole pages
    slot = max(file.nbytes for file in files) * (100 - on_device) // 100 + _SLOT_PAGES * PAGE
    device_memory = memory.total("device") + total * on_device // 100 + 2 * slot
    host_memory = None
    if on_host:
        moved = total * on_host // 100 + (pages if on_device + on_host == 100 else 0)
        host_memory = memory.total("host") + moved + _STAGING_BUFFERS * slot
    return replace(plan, device_memory=device_memory, host_memory=host_memory)


def _memory(plan: Plan, checkpoint: Checkpoint, device: torch.device) -> Memory:
    spec = DecoderSpec.from_config(checkpoint.config)
    if device.type == "cpu":
        return Memory.of(plan, spec, head_shapes(spec))
    from qoff.plan.gpu import memory_on_gpu  # needs Triton

    dtype = resolve_dtype("auto", checkpoint.config, device)
    return memory_on_gpu(plan, spec, head_shapes(spec), device, dtype)
