"""transformers' modules on the ops of a GPU: with transformers' logits, wherever weights are.

Without a GPU everything is in CPU tensors, and Triton interprets the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from qoff.errors import ArgumentError, BudgetError, OpError
from qoff.hf.load import open_model
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.torch_threads import one_torch_thread
from qoff.kvcache import DeviceCache, KVQuant
from qoff.memory.instrumentation import PLAIN
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.cache import ModuleCache
from qoff.models.modules.configs import build
from qoff.models.runtime import Runtime
from tests.instruments import POISON
from tests.models.test_modules import logits_of as unpacked_logits
from tests.models.test_modules import tokens as few_tokens
from tests.models.test_modules_packed import logits_of, tokens
from tests.module_models import expected_logits, module_checkpoint, module_reference
from tests.tiny_families import VOCAB
from tests.tiny_models import refused
from tests.tolerances import relative_rms
from tests.triton_module import triton_module

triton_ops = triton_module("ops")

ON_GPU = torch.cuda.is_available()
HALF = 0.01  # float16, of several layers
# Transposed matrices, of experts, too; biases that attention adds; states beside attention.
UNPACKED = ("gpt2", "aria", "bloom", "falcon_h1")
PACKED = KVQuant(8, 8, window=16)


@pytest.fixture(scope="module", params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of what runs on the ops of a GPU."""
    if request.param == "gpu":
        return {"device": "cuda", "dtype": torch.float16}
    if ON_GPU:
        pytest.skip("Triton interprets kernels only where there is no GPU")
    return {"instrumentation": replace(POISON, ops=triton_ops)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads spin after each of its ops, on cores that other tests may need."""
    with one_torch_thread():
        yield


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(relative_rms(a.cpu(), b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", UNPACKED)
def test_logits_are_those_of_transformers(base: Path, name: str, where: dict[str, Any]) -> None:
    texts = few_tokens([1, 17, 8])
    wanted = expected_logits(module_reference(base, name), *texts)
    with Runtime(module_checkpoint(base, name, "split32"), **where) as runtime:
        assert worst(unpacked_logits(runtime, *texts), wanted) < HALF


def test_a_packed_cache_is_that_of_a_gpu(base: Path, where: dict[str, Any]) -> None:
    name = "vaultgemma-head64"  # some of its layers have a window
    wanted = expected_logits(module_reference(base, name), *tokens())
    path = module_checkpoint(base, name, "split32")
    with Runtime(path, kv=PACKED, **where) as runtime:
        cache = runtime.new_cache(1)
        assert isinstance(cache, ModuleCache)
        assert isinstance(cache.tokens, DeviceCache)
        found = logits_of(runtime)
    with Runtime(path, **where) as runtime:
        exact = logits_of(runtime)
    assert worst(exact, wanted) < HALF < worst(found, wanted) < 3 * HALF


def test_streaming_changes_no_bit(base: Path, where: dict[str, Any]) -> None:
    path, texts = module_checkpoint(base, "jamba", "split32"), few_tokens([1, 17, 8])
    with Runtime(path, **where) as runtime:
        resident = torch.cat(unpacked_logits(runtime, *texts))
    least, _ = refused(lambda: Runtime(path, device_memory=0, **where))
    with Runtime(path, device_memory=least, **where) as runtime:
        assert torch.equal(torch.cat(unpacked_logits(runtime, *texts)), resident)
        assert runtime.stats().slot_bytes > 0


def test_blocks_are_chosen_as_on_a_cpu(base: Path, where: dict[str, Any]) -> None:
    kv, name = replace(PACKED, attention_top=0.5), "stablelm-head64"
    with Runtime(module_checkpoint(base, name), kv=kv) as runtime:
        wanted = logits_of(runtime)
    with Runtime(module_checkpoint(base, name, "split32"), kv=kv, **where) as runtime:
        assert worst(logits_of(runtime), wanted) < 2 * HALF
    with Runtime(module_checkpoint(base, name), kv=PACKED) as runtime:
        assert worst(logits_of(runtime), wanted) > 5 * HALF


def test_sink_tokens_are_refused(base: Path, where: dict[str, Any]) -> None:
    path = module_checkpoint(base, "stablelm-head64", "split32")
    with pytest.raises(ArgumentError, match="on a GPU no token is a sink; use sinks=0"):
        Runtime(path, kv=KVQuant(8, 8, sinks=16), **where)


def test_a_bound_holds_caches_and_passes(base: Path, where: dict[str, Any]) -> None:
    path = module_checkpoint(base, "bloom", "split32")
    options: dict[str, Any] = {"instrumentation": PLAIN, **where, "context": 128}
    least, _ = refused(lambda: open_model(path, device_memory=0, **options))
    with one_torch_thread():
        model = open_model(path, device_memory=least, **options)
    assert "KV cache: float16 (the KV cache of BloomForCausalLM cannot be packed" in repr(model)
    ids = torch.randint(3, VOCAB, (1, 20), device=where.get("device", "cpu"))
    assert model.generate(ids, max_new_tokens=3, min_new_tokens=3).shape == (1, 23)
    with pytest.raises(BudgetError, match="a KV cache of 1 x 100000 tokens wants"):
        model(ids.expand(1, 20).repeat(1, 5000))


def test_what_a_class_wants_in_float32_stays_so() -> None:
    config = AutoConfig.for_model("longcat_flash", num_layers=1, n_routed_experts=4)
    wide = {
        name
        for name, one in build(config, dtype=torch.float16).named_parameters()
        if one.dtype == torch.float32
    }
    assert wide
    assert all("classifier" in name for name in wide)
    assert {one.dtype for one in build(config).parameters()} == {torch.float32}


def test_tokens_there_are_not_are_refused(base: Path, where: dict[str, Any]) -> None:
    with Runtime(module_checkpoint(base, "gpt2", "split32"), **where) as runtime:
        cache = runtime.new_cache(1)
        run = ForwardPass(torch.tensor([VOCAB]), Ragged.of([1], [0]), cache, torch.arange(1))
        with pytest.raises(OpError, match=f"tokens are 0 to {VOCAB - 1}, not {VOCAB}"):
            runtime.forward(run)


def test_buffers_that_no_checkpoint_has_are_counted(base: Path, where: dict[str, Any]) -> None:
    with Runtime(module_checkpoint(base, "gpt2", "split32"), **where) as runtime:
        model = runtime.decoder.model
        tensors = [*model.parameters(), *model.buffers()]
        assert runtime.decoder.outer_bytes == sum(x.nbytes for x in tensors if not x.is_meta)
