"""One row of a peer: transformers in 16 bits, accelerate's offload, FlexGen; each within a budget.

Their weights are one value all over, or random where the device makes them: no file is read.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu_models.ours import Place
from bench.gpu_models.rows import Row
from bench.peers.transformers_model import generate
from qoff.errors import ArgumentError
from qoff.units import parse_size

_WORKING_SHARE = 0.25  # of a budget, for what accelerate does not count: KV cache, activations
_CUT = 5  # tokens from which FlexGen projects the time of all


def transformers(place: Place, row: Row) -> dict[str, Any]:
    """`generate` of a model that is on the device."""
    _limit(place, row)
    config = _config(place, row)
    model_class = importlib.import_module("transformers").AutoModelForCausalLM
    with place.device:
        model = model_class.from_config(config, dtype=place.dtype).eval()
    return _generated(place, row, model)


def accelerate(place: Place, row: Row) -> dict[str, Any]:
    """`generate` of a model that accelerate distributes: as many layers as fit, others on the CPU.

    Without a GPU all of it is offloaded.
    """
    _limit(place, row)
    library = importlib.import_module("accelerate")
    model_class = importlib.import_module("transformers").AutoModelForCausalLM
    with library.init_empty_weights(include_buffers=False):
        model = model_class.from_config(_config(place, row), dtype=place.dtype).eval()
    model.tie_weights()
    spare = 1.0 - _WORKING_SHARE
    memory = {0: int(parse_size(row.budget) * spare) if place.on_gpu else 0, "cpu": 1 << 50}
    split = {"no_split_module_classes": list(model._no_split_modules)}
    where = library.infer_auto_device_map(model, memory, dtype=place.dtype, **split)
    _fill(model)
    if place.on_gpu:
        model = library.dispatch_model(model, where, main_device=0)
    else:
        model = library.cpu_offload(model, place.device)
    return _generated(place, row, model)


def flexgen(place: Place, row: Row) -> dict[str, Any]:
    """FlexGen's own benchmark by its flags, with the weights it calls dummies.

    Raises ArgumentError where its package is not found.
    """
    if place.flexgen is not None:
        sys.path.insert(0, str(place.flexgen.resolve()))
    try:
        program: Any = importlib.import_module("flexgen.flex_opt")
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"no module {error.name!r}: give FlexGen's wheel or folder with --flexgen "
            "(pip download flexgen==0.1.8 --no-deps)"
        ) from error
    program.AutoTokenizer = _Tokenizer
    _limit(place, row)
    parser = argparse.ArgumentParser()
    program.add_parser_arguments(parser)
    with tempfile.TemporaryDirectory(dir=place.folder) as folder:
        log = Path(folder) / "log"
        named = ["--model", f"facebook/{row.model}", "--path", "_DUMMY_", "--log-file", str(log)]
        named += ["--offload-dir", str(Path(folder) / "offload"), "--cut-gen-len", str(_CUT)]
        program.run_flexgen(parser.parse_args([*row.flags.split(), *named]))
        found = program.read_benchmark_log(log)
    return {
        **place.memory(),
        "tokens_per_s": found.total_throughput,
        "decode_tokens_per_s": found.decode_throughput,
        "prefill_s": found.prefill_latency,
        "budget_bytes": parse_size(row.budget),
        "notes": [f"its own projection from {_CUT} tokens"],
    }


def hang(place: Place, row: Row) -> dict[str, Any]:
    """For a rehearsal: never comes back."""
    del place, row
    time.sleep(1e6)
    return {}


def _limit(place: Place, row: Row) -> None:
    """Give torch no more memory of the device than the budget."""
    if place.on_gpu and row.budget:
        total = torch.cuda.get_device_properties(place.device).total_memory
        share = min(1.0, parse_size(row.budget) / total)
        torch.cuda.set_per_process_memory_fraction(share, torch.cuda.current_device())


def _config(place: Place, row: Row) -> Any:
    auto = importlib.import_module("transformers").AutoConfig
    return auto.for_model(**place.models[row.model])


def _fill(model: Any) -> None:
    """Give meta parameters memory of the CPU, written once; what is shared stays so."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in made:
                full = torch.full_like(old, 1e-3, device="cpu")
                made[id(old)] = torch.nn.Parameter(full, requires_grad=False)
            setattr(module, name, made[id(old)])


def _generated(place: Place, row: Row, model: Any) -> dict[str, Any]:
    device = torch.device("cuda", 0) if place.on_gpu else place.device
    generate(model, place.prompts(row, 8).to(device), 2)
    place.synchronize()
    _, timing = generate(model, place.prompts(row, row.prompt).to(device), row.cut or row.new)
    seconds = timing.prefill_s + row.sequences * (row.new - 1) / timing.decode_rate
    return {
        **place.memory(),
        "tokens_per_s": row.sequences * row.new / seconds,
        "decode_tokens_per_s": timing.decode_rate,
        "prefill_s": timing.prefill_s,
        "budget_bytes": parse_size(row.budget) if row.budget else None,
        "notes": [f"projected from {row.cut} tokens"] * (row.cut > 0),
    }


class _Tokenizer:
    """What FlexGen asks of a tokenizer, without a download: a prompt of as many tokens."""

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> _Tokenizer:
        return cls()

    def __call__(self, prompts: list[str], padding: str, max_length: int) -> Any:
        del padding
        return SimpleNamespace(input_ids=[[5] * max_length for _ in prompts])
