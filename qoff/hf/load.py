"""`qoff.load`: from a path or a hub id to a model and a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from qoff.budgets import check_host_bound, memory_bounds, resolve_device
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.kvcache.host.mixed import host_cache
from qoff.kvcache.quant import KVBits, KVQuant, UnpackableError, kv_quant
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.timeline import Timeline
from qoff.models.families.family import full_config
from qoff.models.modules.configs import is_native
from qoff.models.modules.decoder import ModuleDecoder, is_modules
from qoff.models.native.caches import head_shapes, new_states
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from qoff.plan.default import default_bounds, host_bound, within_limit
from qoff.quant import QuantConfig
from qoff.system_memory import refusals

from .budget import Budget, Scoring
from .checkpoints import find_checkpoint
from .device import device_for
from .generation_config import read_generation_config
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from .model import QoffForCausalLM

AUTO = "auto"
logger = logging.getLogger(__name__)


@refusals()
def load(
    path_or_hub_id: str | PathLike[str],
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    context: int | None = None,
    batch_size: int = 1,
    slots: int = 2,
    activation_bits: int = 16,
    kv: KVQuant | KVBits | None = AUTO,
    quant: QuantConfig | None = None,
    cache_dir: str | PathLike[str] | None = None,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    timeline: Timeline | None = None,
    trust_remote_code: bool = False,
) -> tuple[QoffForCausalLM, PreTrainedTokenizerBase]:
    """Load a model that generates like a transformers model, and its tokenizer.

    path_or_hub_id: a qoff checkpoint; or a safetensors directory, a GGUF file or a hub id, which is
    converted once, as `quant` says, into the cache directory (`cache_dir`, by default QOFF_CACHE).
    device: "cpu", a GPU like "cuda", or "auto": a GPU if there is one. dtype:
    of hidden states on a GPU; "auto": what the model was trained in. A CPU computes in float32.

    device_memory bounds everything on the device, in bytes or like "24MiB": weights, KV caches,
    activations, logits and working space; None: as much as it takes, or what is free where the
    weights do not fit that. Room for `batch_size` sequences of `context` tokens (None: see
    `Budget`) is kept free, and weights that do not fit beside it stream through `slots` slots: from
    host memory as far as host_memory goes (None: beside a GPU, what is free), else from disk. A
    longer text may use what else is free; one that does not fit is refused before anything is
    computed. max_memory: the same bounds as Accelerate writes them, {0: "12GiB", "cpu":
    "32GiB"}. activation_bits: 16, or on a CPU 8 for up to twice the speed with many tokens at a
    time, at some loss.

    kv: how the KV cache is packed: 2, 3, 4 or 8 bits, a pair for K and V, text like "4/0-3:8,4"
    (4 bits, but 8 for K and 4 for V in layers 0 to 3), or a KVQuant; None or "none": float32, on a
    CPU, and `dtype` for transformers' modules on a GPU. "auto" is `KVQuant()`, 4 bits behind a
    window of 64 tokens, where the model's attention can be packed, else as None; the model's repr
    says which. timeline: notes every move and computation. Architectures that qoff has no decoder
    for run through transformers' modules, with a packed cache where transformers' interface for
    attention allows; trust_remote_code lets code run that comes with a model, or a tokenizer, that
    transformers does not have.
    Raises ArgumentError, BudgetError with the bytes wanted, FormatError, ChecksumError,
    UnsupportedModelError, ConversionError, or OpError for a head size whose cache cannot be packed.
    """
    if not isinstance(path_or_hub_id, str | PathLike):
        raise ArgumentError(
            f"{path_or_hub_id!r} is neither a path nor the id of a model on the hub"
        )
    _check_room(context, batch_size)
    where = device_for(device)
    device_bytes, host_bytes = _bounds(device_memory, host_memory, max_memory, where)
    if kv != AUTO:
        kv = kv_quant(kv)  # what is none is known before anything is converted
    checkpoint = find_checkpoint(
        path_or_hub_id,
        quant=quant,
        cache_dir=cache_dir,
        revision=revision,
        progress=progress,
        device=where,
        trust_remote_code=trust_remote_code,
    )
    Checkpoint.open(checkpoint)  # what is none has perhaps no tokenizer either
    tokenizer = load_tokenizer(checkpoint, trust_remote_code)  # before free memory is measured
    model = open_model(
        checkpoint,
        device=where,
        dtype=dtype,
        device_memory=device_bytes,
        host_memory=host_bytes,
        context=context,
        batch_size=batch_size,
        slots=slots,
        activation_bits=activation_bits,
        kv=kv,
        trust_remote_code=trust_remote_code,
        instrumentation=Instrumentation(timeline=timeline),
    )
    return model, tokenizer


class Opened(NamedTuple):
    """A checkpoint that runs, what bounds its memory, and how its caches are kept."""

    runtime: Runtime
    budget: Budget | None
    kv: str


def _check_room(context: int | None, batch_size: int) -> None:
    for name, value in (("context", context), ("batch_size", batch_size)):
        if not (isinstance(value, int) and value > 0) and (name, value) != ("context", None):
            raise ArgumentError(f"{name} is {value!r}; use a whole number from 1")


def _bounds(
    device_memory: int | str | None,
    host_memory: int | str | None,
    max_memory: Mapping[int | str, int | str] | None,
    device: torch.device,
) -> tuple[int | None, int | None]:
    """As `memory_bounds`; ArgumentError, too, for one of a CPU that would bound nothing."""
    found = memory_bounds(device_memory, host_memory, max_memory, device)
    check_host_bound(*found, device)
    return found


@refusals()
def open_runtime(
    checkpoint: Path,
    *,
    device: torch.device | str = AUTO,
    dtype: torch.dtype | str = AUTO,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    context: int | None = None,
    batch_size: int = 1,
    slots: int = 2,
    activation_bits: int = 16,
    kv: KVQuant | KVBits | None = AUTO,
    trust_remote_code: bool = False,
    instrumentation: Instrumentation = PLAIN,
    scoring: Scoring | None = None,
) -> Opened:
    """What runs a qoff checkpoint; the arguments are those of `load`. scoring: see `Budget`."""
    _check_room(context, batch_size)
    where = resolve_device(device)
    device_bytes, host_bytes = _bounds(device_memory, host_memory, max_memory, where)
    instrumentation.ops_for(where, activation_bits)  # a GPU that is not there is known first
    packed = KVQuant() if kv == AUTO else kv_quant(kv)
    if device_bytes is None and host_bytes is None:
        files, cache = Checkpoint.open(checkpoint), 0
        if where.type == "cpu" and context is not None:
            cache = batch_size * _cache_bytes(files, packed, context)
        device_bytes, host_bytes = default_bounds(files, where, cache=cache)
    else:
        host_bytes = host_bound(where, device_bytes, host_bytes)
        device_bytes, host_bytes = within_limit(where, device_bytes, host_bytes)

    def opened(kv: KVQuant | None) -> tuple[Runtime, Budget | None]:
        budget = None
        more: dict[str, Any] = {}
        if device_bytes is not None:
            budget = Budget(device_bytes, context, batch_size, kv, scoring)
            more["reserves"] = budget.choices
        runtime = Runtime(
            checkpoint,
            device=where,
            dtype=dtype,
            device_memory=device_bytes,
            host_memory=host_bytes,
            slots=slots,
            activation_bits=activation_bits,
            kv=kv,
            instrumentation=instrumentation,
            trust_remote_code=trust_remote_code,
            **more,
        )
        if budget is not None:
            budget.settle(runtime)
        return runtime, budget

    reason = ""
    try:
        runtime, budget = opened(packed)
    except UnpackableError as error:
        own = not is_modules(Checkpoint.open(checkpoint))
        if kv != AUTO or (own and where.type != "cpu"):
            raise
        packed, reason = None, f" ({error})"
        runtime, budget = opened(None)
    described = str(packed)
    if packed is None:
        described = str(runtime.decoder.dtype).removeprefix("torch.") + reason
    if reason:
        logger.info("KV cache: %s", described)
    return Opened(runtime, budget, described)


def _cache_bytes(checkpoint: Checkpoint, kv: KVQuant | None, tokens: int) -> int:
    """A CPU's KV cache of one sequence; 0 where transformers' modules would have to say it.

    Of as many tokens as the model was made for, at most: an answer may have a bound beyond these.
    """
    if not is_native(checkpoint.config):
        return 0
    spec = DecoderSpec.from_config(checkpoint.config)
    shapes, states = head_shapes(spec), new_states(spec, 1)
    try:
        cache = host_cache(shapes, 1, kv, 0, *states, spec.lent_layers)
    except UnpackableError:
        cache = host_cache(shapes, 1, None, 0, *states, spec.lent_layers)
    return cache.bytes_for(min(tokens, spec.max_position_embeddings))


def open_model(checkpoint: Path, **options: Any) -> QoffForCausalLM:
    """The model of a qoff checkpoint, without its tokenizer. options: of `open_runtime`."""
    import_module("qoff.hf.model")  # 140 MB of transformers, before free memory is measured
    runtime, budget, kv = open_runtime(checkpoint, **options)
    try:
        model = _model(runtime, checkpoint, budget)
        model.kv = kv
        return model
    except BaseException:
        runtime.close()
        raise


def _model(runtime: Runtime, checkpoint: Path, budget: Budget | None) -> QoffForCausalLM:
    from .model import QoffForCausalLM  # 140 MB of transformers, which only this needs

    if isinstance(runtime.decoder, ModuleDecoder):
        model = QoffForCausalLM(runtime.decoder.config, runtime, budget)
        model._is_stateful = runtime.decoder.model._is_stateful  # states that cannot go back
    else:
        config = full_config(runtime.checkpoint.config)
        model = QoffForCausalLM(config, runtime, budget)
    model.name_or_path = str(checkpoint)
    generation = read_generation_config(checkpoint)
    if generation is not None:
        model.generation_config = generation
    model.eval()
    return model
