"""transformers' modules over a KV cache of qoff's own, packed or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from qoff.errors import OpError
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.torch_threads import one_torch_thread
from qoff.kvcache import KVQuant, PackedCache
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.probe import is_standard
from qoff.models.runtime import Runtime
from tests.instruments import POISON
from tests.module_models import PACKABLE, expected_logits, module_checkpoint, module_reference
from tests.tiny_families import EXPERTS, VOCAB
from tests.tiny_models import QUANT, budgets, save_model, save_tokenizer, take_turns
from tests.tolerances import DECODER_LOGITS, PACKED_4, PACKED_8, assert_close

LENGTHS = [200, 1, 133]
UNPACKED = KVQuant(16, 16)
MIXED = KVQuant(16, 16, window=16, layers={1: (8, 8)})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads spin after each of its ops, on cores that other tests may need."""
    with one_torch_thread():
        yield


def tokens() -> tuple[list[Tensor], Tensor]:
    """Prompts, and tokens int64 [sequences, 4] that follow."""
    torch.manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (n,)) for n in LENGTHS]
    return prompts, torch.randint(3, VOCAB, (len(LENGTHS), 4))


def batch(cache: Any, new: list[Tensor]) -> ForwardPass:
    ragged = Ragged.of([len(t) for t in new], cache.lengths)
    return ForwardPass(torch.cat(new), ragged, cache, torch.arange(ragged.tokens))


def logits_of(runtime: Runtime) -> list[Tensor]:
    """Logits of a prefill and of decode steps."""
    prompts, decoded = tokens()
    cache: Any = runtime.new_cache(len(prompts))
    steps = [prompts, *(list(column[:, None]) for column in decoded.T)]
    return [runtime.forward(batch(cache, new)) for new in steps]


def all_logits(path: Path, kv: KVQuant | None = None, **options: Any) -> Tensor:
    with Runtime(path, kv=kv, **options) as runtime:
        return torch.cat(logits_of(runtime))


@pytest.fixture(scope="module", params=PACKABLE)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_logits_are_those_of_transformers(base: Path, name: str) -> None:
    wanted = expected_logits(module_reference(base, name), *tokens())
    with Runtime(module_checkpoint(base, name), kv=UNPACKED) as runtime:
        for one, other in zip(logits_of(runtime), wanted, strict=True):
            assert_close(one, other, tolerance=DECODER_LOGITS)


@pytest.mark.parametrize(
    ("kv", "tolerance"),
    [(KVQuant(8, 8, window=16), PACKED_8), (KVQuant(4, 4), PACKED_4), (MIXED, PACKED_8)],
)
def test_packed_logits_are_close(base: Path, name: str, kv: KVQuant, tolerance: float) -> None:
    path = module_checkpoint(base, name)
    if name == "jamba-head64":  # one of its layers attends
        kv = KVQuant(kv.k_bits, kv.v_bits, kv.window)
    wanted = all_logits(path)
    found = all_logits(path, kv)
    assert_close(found, wanted, tolerance=tolerance)
    if kv.k_bits < 16:
        assert not torch.equal(found, wanted)


def test_streaming_changes_no_bit(base: Path, name: str) -> None:
    path, kv = module_checkpoint(base, name), KVQuant(4, 4, window=16)
    least, _ = budgets(path)
    assert torch.equal(
        all_logits(path, kv, device_memory=least, instrumentation=POISON),
        all_logits(path, kv),
    )


def test_passes_that_take_turns_at_every_layer(base: Path) -> None:
    path, kv = module_checkpoint(base, "vaultgemma-head64"), KVQuant(4, 4, window=16)
    inputs = [torch.randint(3, VOCAB, (90 + n,)) for n in range(3)]
    with Runtime(path, kv=kv) as runtime:
        alone = [runtime.forward(batch(runtime.new_cache(1), [one])) for one in inputs]
        batches = [batch(runtime.new_cache(1), [one]) for one in inputs]
        passes = [runtime.decoder.steps(one) for one in batches]
        together = take_turns(passes, runtime.store)
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


NATIVE: dict[str, dict[str, Any]] = {
    "llama-head64": {},
    "mistral-window": {"head_dim": 64, "sliding_window": 90},
    "qwen3-moe": {"head_dim": 64},
    "gemma2": {"head_dim": 64, "sliding_window": 90},
    "gpt-oss": {"head_dim": 64, "sliding_window": 90},
}


@pytest.mark.parametrize("family", NATIVE)
def test_a_family_with_a_decoder_of_its_own_gives_the_same(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, scales, soft caps and sinks are those that the native decoder knows of."""
    save_model(tmp_path / "model", family, **NATIVE[family])
    save_tokenizer(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "native", quant=QUANT, for_cpu=True)
    monkeypatch.setattr("qoff.models.convert.convert.is_native", lambda config: False)
    convert(tmp_path / "model", tmp_path / "modules", quant=QUANT, for_cpu=True)
    found = all_logits(tmp_path / "modules", UNPACKED)
    assert_close(found, all_logits(tmp_path / "modules"), tolerance=DECODER_LOGITS)
    if family in EXPERTS:
        return  # transformers' routers stay floats
    assert_close(found, all_logits(tmp_path / "native", UNPACKED), tolerance=DECODER_LOGITS)
    kv = KVQuant(4, 4, window=16)
    found, wanted = (all_logits(tmp_path / which, kv) for which in ("modules", "native"))
    # a value at the middle between two levels is rounded up in one and down in the other
    assert_close(found, wanted, tolerance=PACKED_8)


def test_sequences_are_kept_and_forgotten(base: Path) -> None:
    prompts, decoded = tokens()
    with Runtime(
        module_checkpoint(base, "stablelm-head64"), kv=KVQuant(8, 8, window=16)
    ) as runtime:
        cache: Any = runtime.new_cache(3)
        assert isinstance(cache.tokens, PackedCache)
        empty = cache.nbytes
        runtime.forward(batch(cache, prompts))
        assert cache.nbytes > empty
        steps = list(decoded[:, :1])
        wanted = runtime.forward(batch(cache, steps))
        cache.forget(1)
        assert cache.lengths == cache.tokens.lengths == LENGTHS
        cache.select([2, 0, 0])
        again = runtime.forward(batch(cache, [steps[i] for i in (2, 0, 0)]))
        assert_close(again, wanted[[2, 0, 0]], tolerance=DECODER_LOGITS)
        cache.forget(500)
        assert cache.lengths == [0, 0, 0]
        first = runtime.forward(batch(cache, prompts[2:] * 3))
        alone = runtime.forward(batch(runtime.new_cache(1), prompts[2:]))
        assert_close(first[: LENGTHS[2]], alone, tolerance=DECODER_LOGITS)


def test_less_memory_than_a_cache_that_is_not_packed(base: Path) -> None:
    sizes = {}
    for kv in (None, KVQuant(4, 4)):
        with Runtime(module_checkpoint(base, "stablelm-head64"), kv=kv) as runtime:
            cache: Any = runtime.new_cache(1)
            runtime.forward(batch(cache, [torch.arange(3, 3 + 100).repeat(20)[:1900]]))
            sizes[kv] = cache.nbytes
    assert sizes[KVQuant(4, 4)] < 0.35 * sizes[None]


@pytest.mark.parametrize(
    ("mask", "window", "standard"),
    [
        (causal_mask_function, None, True),
        (sliding_window_causal_mask_function(7), 7, True),
        (sliding_window_causal_mask_function(8), 7, False),
        (sliding_window_causal_mask_function(7), None, False),
        (chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int64)), 7, False),
        (or_masks(causal_mask_function, lambda b, h, q, k: k >= 0), None, False),
        (and_masks(causal_mask_function, lambda b, h, q, k: k > 2), None, False),
    ],
)
def test_which_masks_are_understood(mask: Any, window: int | None, standard: bool) -> None:
    assert is_standard(mask, window) == standard


def test_the_implementation_is_for_qoff_alone(base: Path) -> None:
    path = module_checkpoint(base, "stablelm-head64")
    with Runtime(path, kv=UNPACKED) as runtime:
        model = module_reference(base, "stablelm-head64")
        model.set_attn_implementation(runtime.decoder.model.config._attn_implementation)
        with pytest.raises(OpError, match=r"for models of qoff\.load"):
            model(torch.tensor([[3, 4]]))
