"""Whole steps of training on this CPU: tokens a second, beside torch's in memory.

Weights are random. All take turns on the same batches: full training in float32 of a small model by
`torch.optim.AdamW(fused=True)`, and by qoff with everything in memory, with activations kept, with
8-bit moments, and with weights, states and inputs of layers on disk; adapters by PEFT and
transformers in float32, and beside bitsandbytes' 4-bit weights where `bench.peers bitsandbytes` has
installed it, and by qoff beside packed weights in memory and from disk.

The disk's figures are those of the page cache where the files fit into memory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bar, Report, arguments
from bench.peers import packages
from bench.random_model import SMALL, TINYLLAMA
from bench.sampling import timed
from qoff import train
from qoff.models.convert.convert import convert
from qoff.quant import QuantConfig

_MIDDLE = TINYLLAMA | {
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
}
_FULL, _LORA = "all weights, ", "adapters, "
_TORCH, _PEFT = f"{_FULL}torch", f"{_LORA}PEFT and transformers, fp32"
_BITSANDBYTES = f"{_LORA}PEFT and bitsandbytes NF4"
_MEMORY, _DISK = f"{_LORA}qoff, packed in memory", f"{_LORA}qoff, packed from disk"
_KEPT = f"{_FULL}qoff, activations kept"
_MEMORY_KEPT = f"{_MEMORY}, activations kept"

Step = Callable[[], object]


def random_model(config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of transformers with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    wanted = {k: v for k, v in config.items() if k != "architectures"}
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**wanted), dtype=dtype)
    return made.train()


def adapted(model: Any) -> Any:
    """The same with adapters beside all linear layers."""
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, wanted)


def _nf4_model(path: Path) -> Any:
    """The float model there with bitsandbytes' 4-bit weights; it computes in float32."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    wanted = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    made = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=wanted, dtype=torch.float32, device_map="cpu"
    )
    return made.train()


def _theirs(model: Any, batches: list[dict[str, Tensor]]) -> Step:
    learns = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=1e-5, fused=True)

    def step() -> None:
        for batch in batches:
            loss = model(**batch, use_cache=False).loss / len(batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def contestants(
    config: dict[str, Any], batches: list[dict[str, Tensor]], folder: Path, only: str
) -> dict[str, Step]:
    """One step of each by name, of those whose names begin with `only`."""
    from transformers import AutoModelForCausalLM

    tokens, count = batches[0]["input_ids"].numel(), len(batches)

    def ours(model: Any, bits: int = 32, **options: Any) -> Step:
        optimizer = train.AdamW(lr=1e-5, bits=bits)
        training = train.offload(model, optimizer, tokens=tokens, micro_batches=count, **options)
        return lambda: training.step(batches)

    path = folder / "packed"
    if _LORA.startswith(only):
        random_model(config).save_pretrained(folder / "float")
        convert(folder / "float", path, quant=QuantConfig(solver="rtn"), for_cpu=True)

    def packed(**places: Any) -> Any:
        return adapted(AutoModelForCausalLM.from_pretrained(path, **places))

    theirs: dict[str, Callable[[], Step]] = {}
    if packages.use("bitsandbytes"):
        theirs[_BITSANDBYTES] = lambda: _theirs(adapted(_nf4_model(folder / "float")), batches)
    makers: dict[str, Callable[[], Step]] = theirs | {
        _TORCH: lambda: _theirs(random_model(config), batches),
        f"{_FULL}qoff": lambda: ours(random_model(config)),
        _KEPT: lambda: ours(random_model(config), activation_memory="64GiB"),
        f"{_FULL}qoff, 8-bit moments": lambda: ours(random_model(config), bits=8),
        f"{_FULL}qoff, on disk": lambda: ours(random_model(config), host_memory=0, disk=folder),
        _PEFT: lambda: _theirs(adapted(random_model(config)), batches),
        _MEMORY: lambda: ours(packed()),
        _MEMORY_KEPT: lambda: ours(packed(), activation_memory="64GiB"),
        _DISK: lambda: ours(packed(device_map="disk")),
    }
    return {name: make() for name, make in makers.items() if name.startswith(only)}


def _kind(text: str) -> str:
    if text not in ("", "all", "adapters"):
        raise argparse.ArgumentTypeError(f"{text!r} is no kind; use all or adapters")
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    args = arguments(
        __doc__,
        argv,
        only=(_kind, "", "measure one kind of training: 'all' (weights) or 'adapters'"),
        tokens=(int, 512, "of a micro-batch"),
        micro_batches=(int, 2, "of a step"),
        layers=(int, 0, "of a model that is as wide as TinyLlama (2048), instead"),
        rounds=(int, 3, "steps of each"),
    )
    config = SMALL | {"num_hidden_layers": 2, "hidden_size": 128} if args.quick else _MIDDLE
    if args.layers:
        config = TINYLLAMA | {"num_hidden_layers": args.layers}
    tokens, rounds = (32, 1) if args.quick else (args.tokens, args.rounds)
    ids = torch.randint(3, config["vocab_size"], (args.micro_batches, 1, tokens))
    batches = [{"input_ids": x, "labels": x} for x in ids]
    with tempfile.TemporaryDirectory() as folder:
        steps = contestants(config, batches, Path(folder), args.only)
        runs = {name: timed(step, 0.0) for name, step in steps.items()}  # two steps go before
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                seconds[name].append(run())
    report = Report(
        "train_steps",
        {"config": config, "tokens": tokens, "micro_batches": args.micro_batches, "rounds": rounds},
        f"{ids.numel():,} tokens a step, fastest of {rounds}",
        ("", "tokens/s", "of torch or PEFT"),
    )
    rates = {name: ids.numel() / min(found) for name, found in seconds.items()}
    for name, rate in rates.items():
        base = rates[_TORCH if name.startswith(_FULL) else _PEFT]
        report.measured[name], report.ratios[name] = rate, rate / base
        report.rows.append((name, f"{rate:.0f}", f"{rate / base:.2f}"))
    for what, wanted, ours, theirs in (
        ("full training with activations kept over torch", 1.0, _KEPT, _TORCH),
        ("adapters from disk over packed in memory", 0.9, _DISK, _MEMORY),
        ("adapters, activations kept, over PEFT and transformers", 1.5, _MEMORY_KEPT, _PEFT),
        ("the same, over PEFT and bitsandbytes", 1.5, _MEMORY_KEPT, _BITSANDBYTES),
    ):
        if ours in rates and theirs in rates:
            report.bars.append(Bar(what, wanted, rates[ours] / rates[theirs]))
    report.publish(args.out)


if __name__ == "__main__":
    main()
