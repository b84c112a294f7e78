"""Architectures without a spec run through transformers' modules, with transformers' logits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qoff.checkpoint import Checkpoint, QuantEntry, TensorEntry
from qoff.errors import (
    ArgumentError,
    FormatError,
    OpError,
    QuantizationError,
    UnsupportedModelError,
)
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.torch_threads import one_torch_thread
from qoff.kvcache import KVQuant
from qoff.memory import residency_of
from qoff.memory.instrumentation import Instrumentation
from qoff.models.convert.convert import convert
from qoff.models.families import FAMILIES, SOURCES
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.cache import ModuleCache
from qoff.models.modules.configs import build, read_config
from qoff.models.modules.structure import buffers_from_config
from qoff.models.runtime import Runtime
from tests.instruments import POISON
from tests.module_models import (
    MODULES,
    NEWEST,
    OWN_CACHES,
    SEEING,
    changed,
    dense,
    expected_logits,
    module_checkpoint,
    module_reference,
    module_source,
    save_model_with_code,
    save_module_model,
)
from tests.tiny_families import TINY, VOCAB
from tests.tiny_models import QUANT, budgets, take_turns
from tests.tolerances import DECODER_LOGITS, RELATIVE_RMS, assert_close

DECODE_STEPS = 4
LENGTHS = [1, 17, 8]
RECURRENT = ["jamba", "falcon_h1", "mamba2"]
HYBRIDS = ["mamba", "hybrid", "hybrid"]


@pytest.fixture(scope="module", params=MODULES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(base: Path, name: str) -> Any:
    return module_reference(base, name)


@pytest.fixture(scope="module")
def resident(base: Path, name: str) -> Tensor:
    """Logits of all steps with all weights in memory."""
    with one_torch_thread(), Runtime(module_checkpoint(base, name)) as runtime:
        return torch.cat(logits_of(runtime, *tokens(LENGTHS)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads spin after each of its ops, on cores that other tests may need."""
    with one_torch_thread():
        yield


def tokens(lengths: Sequence[int], seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Prompts, and tokens int64 [sequences, DECODE_STEPS] that follow."""
    torch.manual_seed(seed)
    prompts = [torch.randint(3, VOCAB, (n,)) for n in lengths]
    return prompts, torch.randint(3, VOCAB, (len(lengths), DECODE_STEPS))


def next_batch(cache: ModuleCache, new: list[Tensor]) -> ForwardPass:
    ragged = Ragged.of([len(t) for t in new], cache.lengths)
    return ForwardPass(torch.cat(new), ragged, cache, torch.arange(ragged.tokens))


def logits_of(runtime: Runtime, prompts: list[Tensor], decoded: Tensor) -> list[Tensor]:
    """Logits of a prefill and of decode steps."""
    cache: Any = runtime.new_cache(len(prompts))
    steps = [prompts, *(list(column[:, None]) for column in decoded.T)]
    return [runtime.forward(next_batch(cache, new)) for new in steps]


def test_no_spec_is_needed(name: str) -> None:
    assert (MODULES[name]["model_type"] in {*FAMILIES, *SOURCES}) == (
        name in ("gemma3n", "falcon_h1")  # as earlier versions converted them
    )


@pytest.mark.parametrize("packing", ["rows16", "split32"])
def test_logits_are_those_of_transformers(
    base: Path, name: str, reference: Any, packing: str
) -> None:
    hooks = Instrumentation(ops=reference_ops if packing == "split32" else None)
    tolerance = DECODER_LOGITS if packing == "rows16" else RELATIVE_RMS[torch.float32]
    prompts, decoded = tokens(LENGTHS)
    wanted = expected_logits(reference, prompts, decoded)
    path = module_checkpoint(base, name, packing)
    with Runtime(path, instrumentation=hooks) as runtime:
        found = logits_of(runtime, prompts, decoded)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, tolerance=tolerance)


@pytest.mark.parametrize("name", [*NEWEST, "cohere2_vision"])
def test_so_are_those_of_newer_models(base: Path, name: str) -> None:
    prompts, decoded = tokens(LENGTHS)
    path = module_checkpoint(base, name)
    wanted = expected_logits(module_reference(base, name), prompts, decoded)
    with Runtime(path, device_memory=budgets(path)[0], instrumentation=POISON) as runtime:
        found = logits_of(runtime, prompts, decoded)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, tolerance=DECODER_LOGITS)


@pytest.mark.parametrize("name", [*OWN_CACHES, *SEEING])
def test_so_are_those_of_one_sequence(base: Path, name: str) -> None:
    """Of models whose caches a batch may not share, or that see."""
    prompts, decoded = tokens((37,))
    path = module_checkpoint(base, name)
    wanted = expected_logits(module_reference(base, name), prompts, decoded)
    with Runtime(path, device_memory=budgets(path)[0], instrumentation=POISON) as runtime:
        found = logits_of(runtime, prompts, decoded)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, tolerance=DECODER_LOGITS)


def test_streaming_changes_no_bit(base: Path, name: str, resident: Tensor) -> None:
    path = module_checkpoint(base, name)
    least, _ = budgets(path)
    with Runtime(path, device_memory=least, instrumentation=POISON) as runtime:
        assert torch.equal(torch.cat(logits_of(runtime, *tokens(LENGTHS))), resident)
        check_interleaved(runtime)
        stats = runtime.stats()
    assert stats.arena_peak <= least
    assert stats.slot_bytes > 0


def test_matrices_in_tiles_change_no_bit(
    base: Path, name: str, resident: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = module_checkpoint(base, name)
    plan = residency_of(Checkpoint.open(path), [], tile_bytes=1)
    assert plan.tiled
    monkeypatch.setattr("qoff.models.runtime.plan_residency", lambda *_, **__: plan)
    with Runtime(path, instrumentation=POISON) as runtime:
        assert torch.equal(torch.cat(logits_of(runtime, *tokens(LENGTHS))), resident)
        check_interleaved(runtime)


def check_interleaved(runtime: Runtime) -> None:
    """Four passes that take turns at every unit have the logits that each has alone."""
    inputs = [tokens([2 + seed, 3], seed)[0] for seed in range(4)]
    alone = []
    for prompts in inputs:
        cache: Any = runtime.new_cache(2)
        alone.append(runtime.forward(next_batch(cache, prompts)))
    caches: list[Any] = [runtime.new_cache(2) for _ in inputs]
    passes = [runtime.decoder.steps(next_batch(*both)) for both in zip(caches, inputs, strict=True)]
    for one, other in zip(take_turns(passes, runtime.store), alone, strict=True):
        assert torch.equal(one, other)


def test_linear_layers_are_quantized_and_the_rest_is_as_it_was(
    base: Path, name: str, reference: Any
) -> None:
    path = module_checkpoint(base, name)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.config["quantization_config"]["layout"] == "modules"
    state = reference.state_dict()
    for file in checkpoint.layers:
        kinds = {type(entry) for entry in file.weights.values()}
        assert kinds == {QuantEntry, TensorEntry}
        for key, entry in file.weights.items():
            if isinstance(entry, TensorEntry):
                assert torch.equal(dense(file, key).to(state[key].dtype), state[key])
    entries = [e for f in checkpoint.layers for e in f.weights.values()]
    floats = [e for e in entries if isinstance(e, TensorEntry) and len(e.shape) == 2]
    assert not [e.name for e in floats if all(n % QUANT.group_size == 0 for n in e.shape)]


def test_conversion_keeps_sixteen_bits_where_they_are_exact(tmp_path: Path) -> None:
    save_module_model(tmp_path / "model", "stablelm", torch.bfloat16)
    convert(tmp_path / "model", tmp_path / "out", quant=QUANT)
    checkpoint = Checkpoint.open(tmp_path / "out")
    entry = checkpoint.layers[0].weights["model.layers.0.input_layernorm.weight"]
    assert isinstance(entry, TensorEntry)
    assert entry.dtype == torch.bfloat16


def test_what_a_model_sees_with_is_gone(tmp_path: Path) -> None:
    """Numbers of a module that holds the language model, too, which transformers initializes."""
    sees = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    small = {**sees, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
    config = {
        "model_type": "deepseek_vl_hybrid",
        "text_config": {"model_type": "llama", **sees, "num_attention_heads": 2, "vocab_size": 64},
        "vision_config": {**small, "model_type": "siglip_vision_model"},
        "high_res_vision_config": {**small, "output_channels": 32, "mlp_dim": 32},
    }
    model = build(read_config(config, tmp_path, tensors=100))
    names = {name for name, _ in model.named_parameters()}
    assert all(".language_model." in name or name == "lm_head.weight" for name in names)
    assert buffers_from_config(model) > 0  # angles


@pytest.mark.parametrize("head", ["same", "alone", "another"])
def test_a_head_that_differs_from_the_embedding_is_kept(tmp_path: Path, head: str) -> None:
    save_module_model(tmp_path / "model", "stablelm")
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    table = state["model.embed_tokens.weight"].clone()
    if head != "another":
        state["lm_head.weight"] = table
    if head == "alone":
        del state["model.embed_tokens.weight"]
    save_file(state, file, {"format": "pt"})
    convert(changed(tmp_path / "model", tie_word_embeddings=True), tmp_path / "out", quant=QUANT)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.config["tie_word_embeddings"] is (head != "another")
    assert ("lm_head" in checkpoint.outer.weights) is (head == "another")
    assert_close(dense(checkpoint.outer, "model.embed_tokens"), table, tolerance=0.02)
    Runtime(tmp_path / "out").close()


def test_a_cache_forgets_and_selects(base: Path) -> None:
    prompts, decoded = tokens([4, 6])
    with Runtime(module_checkpoint(base, "stablelm")) as runtime:
        cache: Any = runtime.new_cache(2)
        runtime.forward(next_batch(cache, prompts))
        first = runtime.forward(next_batch(cache, list(decoded[:, :1])))
        assert cache.nbytes > 0
        cache.forget(1)
        assert cache.lengths == [4, 6]
        assert torch.equal(runtime.forward(next_batch(cache, list(decoded[:, :1]))), first)
        cache.forget(1)
        cache.select([1, 0, 1])
        swapped = [decoded[1, :1], decoded[0, :1], decoded[1, :1]]
        found = runtime.forward(next_batch(cache, swapped))
        assert_close(found, first[[1, 0, 1]], tolerance=DECODER_LOGITS)
        assert not cache.can_forget([1, 0, 0])
        cache.undo([1, 0, 0])
        with pytest.raises(OpError, match="make a new cache"):
            runtime.forward(next_batch(cache, swapped))
        cache.forget(100)
        assert cache.lengths == [0, 0, 0]
        assert runtime.forward(next_batch(cache, swapped)).isfinite().all()


def test_a_cache_is_gone_on_with_by_as_many_tokens_of_each_sequence(base: Path) -> None:
    prompts, decoded = tokens([4, 9])
    with Runtime(module_checkpoint(base, "vaultgemma")) as runtime:
        cache: Any = runtime.new_cache(2)
        runtime.forward(next_batch(cache, prompts))
        with pytest.raises(OpError, match="as many tokens"):
            runtime.forward(next_batch(cache, [decoded[0], decoded[1, :1]]))
        found = runtime.forward(next_batch(cache, list(decoded)))
        whole = [torch.cat(both) for both in zip(prompts, decoded, strict=True)]
        wanted = runtime.forward(next_batch(cast(Any, runtime.new_cache(2)), whole))
    rows = [*range(4, 4 + DECODE_STEPS), *range(17, 17 + DECODE_STEPS)]
    assert_close(found, wanted[rows], tolerance=DECODER_LOGITS)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_states_go_on_token_by_token_only(base: Path, name: str) -> None:
    with Runtime(module_checkpoint(base, name)) as runtime:
        cache: Any = runtime.new_cache(1)
        runtime.forward(next_batch(cache, [torch.arange(3, 9)]))
        with pytest.raises(OpError, match="recurrent states"):
            runtime.forward(next_batch(cache, [torch.arange(3, 9)]))
        assert not cache.can_forget([1])
        with pytest.raises(ArgumentError, match="cannot go back"):
            cache.forget(1)
        runtime.forward(next_batch(cache, [torch.arange(3, 4)]))


def test_a_pass_that_is_given_up_leaves_the_others_alone(base: Path) -> None:
    prompts, decoded = tokens(LENGTHS)
    with Runtime(module_checkpoint(base, "jamba")) as runtime:
        wanted = torch.cat(logits_of(runtime, prompts, decoded))
        cache: Any = runtime.new_cache(3)
        steps = runtime.decoder.steps(next_batch(cache, prompts))
        with runtime.store.use(next(steps)) as weights:
            steps.send(weights)
        steps.close()
        with pytest.raises(OpError, match="not finished"):
            runtime.forward(next_batch(cache, prompts))
        assert torch.equal(torch.cat(logits_of(runtime, prompts, decoded)), wanted)


def test_a_packed_cache_is_refused(base: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="use kv=None"):
        Runtime(module_checkpoint(base, "bloom"), kv=KVQuant(4, 4))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("recurrent_gemma", {**TINY, "lru_width": 64}),
        ("xlm", {"emb_dim": 64, "n_layers": 2, "n_heads": 2, "n_words": 128, "causal": True}),
    ],
)
def test_a_model_with_states_of_its_own_is_refused(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    """Within its modules, or in a dict."""
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="keeps its states outside"):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)


def test_code_of_a_model_runs_only_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("sys.path", [*sys.path])
    source = save_model_with_code(tmp_path / "model")
    convert(source, tmp_path / "out", quant=QUANT, for_cpu=True, trust_remote_code=True)
    prompts, decoded = tokens(LENGTHS)
    with Runtime(tmp_path / "out", trust_remote_code=True) as runtime:
        assert type(runtime.decoder.model).__name__ == "HalForCausalLM"
        found = logits_of(runtime, prompts, decoded)
    with pytest.raises(UnsupportedModelError, match="pass trust_remote_code=True"):
        Runtime(tmp_path / "out")
    changed(source, model_type="stablelm", auto_map=None)
    convert(source, tmp_path / "known", quant=QUANT, for_cpu=True)
    with Runtime(tmp_path / "known") as runtime:
        wanted = logits_of(runtime, prompts, decoded)
    assert torch.equal(torch.cat(found), torch.cat(wanted))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "t5"}, "model_type is 't5', an encoder-decoder"),
        ({"model_type": "bart"}, "model_type is 'bart', an encoder-decoder"),
        ({"is_encoder_decoder": True}, "'stablelm', an encoder-decoder"),
        ({"model_type": "hal9000"}, "model_type is 'hal9000', which neither qoff nor transformers"),
        ({"model_type": "vit"}, "model_type is 'vit', of which transformers .* has no decoder"),
        ({"model_type": "diffusion_gemma"}, "'diffusion_gemma', of which transformers .* has no"),
        ({"model_type": "blip-2"}, "Blip2ForConditionalGeneration does not read text without an"),
        ({"model_type": "cpmant"}, "'cpmant', which wants all tokens of a sequence in every pass"),
        (
            {"model_type": "prophetnet", "is_decoder": True, "is_encoder_decoder": False},
            "'prophetnet', whose head predicts several tokens",
        ),
        ({"model_type": "xmod", "is_decoder": True}, "whose default_language is None; set it"),
        (
            {"model_type": "zamba2", "tie_word_embeddings": True, "layers_block_type": HYBRIDS},
            "Zamba2ForCausalLM shares weights among modules",
        ),
        ({"model_type": "bert"}, "model_type is 'bert', of which transformers .* has no decoder"),
        (
            {"model_type": "hal9000", "auto_map": {"AutoModelForCausalLM": "hal.Hal"}},
            "pass trust_remote_code=True",
        ),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    save_module_model(tmp_path / "model", "stablelm")
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        convert(changed(tmp_path / "model", **values), tmp_path / "out", quant=QUANT)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    save_module_model(tmp_path / "model", "stablelm")
    with pytest.raises(FormatError, match="not of one model"):
        convert(changed(tmp_path / "model", intermediate_size=128), tmp_path / "out", quant=QUANT)
    changed(tmp_path / "model", intermediate_size=96, num_hidden_layers=4)
    with pytest.raises(FormatError, match=r"no tensor model\.layers\.3\."):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)


def test_nan_is_refused(tmp_path: Path) -> None:
    save_module_model(tmp_path / "model", "stablelm")
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.input_layernorm.weight"][3] = float("nan")
    save_file(state, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"layers\.1\.input_layernorm\.weight: holds NaN"):
        convert(tmp_path / "model", tmp_path / "out", quant=QUANT)


def test_a_layout_of_the_future_is_refused(base: Path, tmp_path: Path) -> None:
    convert(module_source(base, "stablelm"), tmp_path / "out", quant=QUANT)
    quantization = Checkpoint.open(tmp_path / "out").config["quantization_config"]
    changed(tmp_path / "out", quantization_config={**quantization, "layout": "holographic"})
    with pytest.raises(FormatError, match="not read layout 'holographic'"):
        Runtime(tmp_path / "out")
