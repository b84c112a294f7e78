"""Training on this GPU: losses beside the CPU's, tokens per second, bytes beside those counted.

A small model in Llama's shape with random weights: all of them in float32, which is compared with
the CPU, and in bfloat16; adapters beside packed weights that stream from host memory and from disk.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bench.gpu.child import Emit
from bench.random_model import write_random_checkpoint
from qoff.budgets import resolve_device, resolve_dtype

SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    }
)
TINY: Mapping[str, Any] = MappingProxyType(
    {
        **SMALL,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 256,
    }
)
_STEPS = 4
# Of losses, relative, after so many steps: other sums in float32, and bfloat16 beside float32.
_FLOAT32, _BFLOAT16 = 2e-4, 3e-2


@dataclass(frozen=True)
class Kind:
    """One training. compared: the most that losses differ from the CPU's, relative.

    places: where `from_pretrained` has packed layers, or None where all weights learn. on_disk:
    weights and states of what learns are there, too.
    """

    name: str
    dtype: torch.dtype
    compared: float
    places: str | None = None
    on_disk: bool = False


KINDS = (
    Kind("all weights, float32", torch.float32, _FLOAT32),
    Kind("all weights, float32, from disk", torch.float32, _FLOAT32, on_disk=True),
    Kind("all weights, bfloat16", torch.bfloat16, _BFLOAT16),
    Kind("adapters, packed in host memory", torch.bfloat16, _BFLOAT16, "cpu"),
    Kind("adapters, packed on disk", torch.bfloat16, _BFLOAT16, "disk", on_disk=True),
)


def measure(
    emit: Emit,
    device: torch.device,
    tiny: bool,
    as_gpu: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Report each kind as {"training": row}; one that fails is reported, too.

    as_gpu: what the steps that are compared with the CPU's are taken within, in a rehearsal.
    """
    device = resolve_device(device)
    config = TINY if tiny else SMALL
    tokens, batches = (16, 2) if tiny else (256, 4)
    ids = torch.randint(3, config["vocab_size"], (batches, 1, tokens))
    given = [{"input_ids": x, "labels": x} for x in ids]
    if tiny:
        torch.set_num_threads(1)  # more are slower on so small matrices
    with tempfile.TemporaryDirectory(prefix="qoff-training-") as folder:
        path = Path(folder)
        packing = "rows16" if device.type == "cpu" else "split32"
        write_random_checkpoint(path / "packed", config, packing=packing)
        wanted: dict[bool, list[float]] = {}
        for kind in KINDS:
            emit({"begin": kind.name})
            make = partial(_model, config, path / "packed", kind)
            adapters = kind.places is not None
            try:
                if adapters not in wanted:
                    wanted[adapters] = _trained(make, torch.device("cpu"), given, path, kind)[0]
                with as_gpu():
                    losses, row = _trained(make, device, given, path, kind)
            except Exception as error:  # of one kind, beside others
                emit({"failed": f"training, {kind.name}: {type(error).__name__}: {error}"})
                continue
            pairs = zip(losses, wanted[adapters], strict=True)
            row["difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
            row |= {"name": kind.name, "losses": losses, "bound": kind.compared}
            emit({"training": row})


def line(row: Mapping[str, Any]) -> str:
    """A row in words."""
    peak = f", peak {row['peak'] / 2**20:.0f} MiB" if "peak" in row else ""
    return (
        f"training, {row['name']}: losses within {row['difference']:.1e} of the CPU's, at most "
        f"{row['bound']:.0e}; {row['tokens_per_s']:.0f} tokens/s; arenas "
        f"{row['arenas'] / 2**20:.0f} MiB{peak}"
    )


def _trained(
    make: Callable[[torch.device], Any],
    device: torch.device,
    batches: list[dict[str, Tensor]],
    folder: Path,
    kind: Kind,
) -> tuple[list[float], dict[str, Any]]:
    """Losses of some steps; tokens per second of all but the first; bytes of the GPU."""
    from qoff import train
    from qoff.train.needs import needs_of
    from qoff.train.placement import placed

    if device.type == "cuda":
        gc.collect()  # the model before is in circles, and its weights in the GPU's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    tokens = batches[0]["input_ids"].numel()
    model = make(device)
    given = partial(
        train.offload,
        model,
        train.AdamW(lr=1e-4),
        tokens=tokens,
        micro_batches=len(batches),
        device=device,
        disk=folder,
    )
    if kind.on_disk:  # all that can be
        sizes = needs_of(model, train.AdamW(), tokens, len(batches), False, device=device)[2]
        given = partial(given, host_memory=placed(sizes, None, 0, True, apart=True).totals[1])
    training = given()
    losses, start = [training.step(batches)], time.perf_counter()
    losses += [training.step(batches) for _ in range(_STEPS - 1)]
    seconds = time.perf_counter() - start
    counted = sum(training.placement.device.values())
    row: dict[str, Any] = {
        "tokens_per_s": (_STEPS - 1) * len(batches) * tokens / seconds,
        "arenas": counted,
        "moved": training.stats.moved,
    }
    if device.type == "cuda":
        row["peak"] = torch.cuda.max_memory_allocated(device)
    return losses, row


def _model(config: Mapping[str, Any], packed: Path, kind: Kind, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    on_cpu = device.type == "cpu"
    dtype = torch.float32
    if not on_cpu and kind.dtype != dtype:
        dtype = resolve_dtype("auto", {}, device)  # float16 on an old GPU
    if kind.places is None:
        given = {k: v for k, v in config.items() if k != "architectures"}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=dtype)
    from peft import LoraConfig, get_peft_model

    places: Any = "disk" if on_cpu and not torch.cuda.is_available() else "cpu"
    if not on_cpu:
        places = {"": device.index or 0, "model.layers": kind.places}
    model: Any = AutoModelForCausalLM.from_pretrained(packed, device_map=places, dtype=dtype)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
