"""Adapters in the native decoder: PEFT's logits, row by row, and what is refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from qoff.errors import ArgumentError, FormatError, QoffError, UnsupportedModelError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference
from qoff.models import adapter_layers
from qoff.models.adapters import AdapterFile, Adapters, adapter_config
from qoff.models.forward_pass import ForwardPass
from qoff.models.layer_weights import layer_weights
from qoff.models.spec import DecoderSpec
from tests.adapters import save_adapter
from tests.engine.test_allocations import Peak
from tests.tiny_families import FAMILIES as FAMILY
from tests.tiny_families import TINY
from tests.tiny_models import PlainRun, reference_model, tiny_checkpoint
from tests.tolerances import DECODER_LOGITS, LINEAR_LOGITS, assert_close

PROMPTS = [torch.tensor(p) for p in ([5, 6, 7, 8, 9, 10], [11, 12, 20], [21, 22, 23, 24])]
FAMILIES = ["llama", "llama-biased", "phi3", "gpt-neox", "gemma2", "cohere", "granite", "opt-350m"]
FAMILIES += ["qwen3.5", "kimi-linear", "lfm2", "granite-h", "nemotron-h-latent", "falcon-h1"]
FAMILIES += ["laguna-per-element", "mimo-v2", "apertus", "phimoe", "ling3", "olmo-hybrid"]
# Where PEFT refuses "all-linear", and Nemotron's `in_proj` of Mamba has no whole blocks of rows;
# without what latent attention multiplies by apart, and what is no whole blocks with KDA's four
# heads.
TARGETS = {
    "nemotron-h-latent": r".*(q_proj|o_proj|up_proj|down_proj|latent_proj)",
    "kimi-linear": r".*(\.[qkvo]_proj|[fg]_b_proj|(gate|up|down)_proj|kv_a_proj_with_mqa)",
    "phimoe": r".*[qkvo]_proj",  # routers are linear layers there
    "ling3": r".*(layers.[02].*\.[gkoqv]_proj|o_proj|(gate|up|down)_proj)",
    "olmo-hybrid": r".*([gkoqv]_proj|(gate|up|down)_proj)",
    "falcon-h1": r".*([qkvo]_proj|gate_proj|up_proj|down_proj|in_proj)",
}
LORA = "base_model.model.model."


def logits(
    run: PlainRun,
    adapters: Adapters | None,
    each: list[str | None],
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    cache = run.decoder.new_cache(len(PROMPTS))
    ragged = Ragged.of([len(p) for p in PROMPTS], [0] * len(PROMPTS))
    rows = torch.arange(ragged.tokens) if rows is None else rows
    work = ForwardPass(torch.cat(PROMPTS), ragged, cache, rows)
    if adapters is not None:
        numbers = [adapters.number(x) for x, p in zip(each, PROMPTS, strict=True) for _ in p]
        work.adapters = adapters.rows(numbers)
    return run.forward(work)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_the_logits_of_its_adapter(
    family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    models: dict[str | None, Any] = {None: reference_model(checkpoint)}
    targets = {"target_modules": TARGETS.get(family, "all-linear")}
    models["all"] = save_adapter(checkpoint, tmp_path / "all", 1, lora_alpha=6, **targets)
    layer = {"phi3": "qkv_proj", "gpt-neox": "query_key_value"}.get(family, "v_proj")
    few = {"r": 3, "target_modules": [layer], "use_rslora": True}
    few |= {"alpha_pattern": {f"layers.1.*{layer}": 11}, "rank_pattern": {f"0.*{layer}": 5}}
    models["few"] = save_adapter(checkpoint, tmp_path / "few", 2, **few)
    run = PlainRun(checkpoint, cpu)
    spec = run.decoder.spec
    adapters = Adapters({name: tmp_path / name for name in ("all", "few")}, spec)
    some = frozenset(sorted(adapters.layers.places)[::2])
    adapters.load(some, torch.device("cpu"), through_slot=family == "llama")
    each = ["few", None, "all"]
    tolerance = DECODER_LOGITS if spec.recurrent is None else LINEAR_LOGITS
    found = logits(run, adapters, each).split([len(p) for p in PROMPTS])
    with torch.no_grad():
        for name, prompt, mine in zip(each, PROMPTS, found, strict=True):
            assert_close(mine, models[name](prompt[None]).logits[0], tolerance=tolerance)
    plain = logits(run, None, each).split([len(p) for p in PROMPTS])
    assert torch.equal(found[1], plain[1])
    assert not torch.allclose(found[0], plain[0], rtol=0.01)
    last = torch.tensor([len(p) for p in PROMPTS]).cumsum(0) - 1
    assert torch.equal(logits(run, adapters, each, last), torch.cat(found)[last])
    memory = adapters.layers._memory.values()
    counted = sum(adapters.layers.nbytes(some, through_slot=False))
    assert counted == sum(adapters.layers.nbytes(adapters.layers.places, through_slot=False))
    slot = adapters.layers._slot
    if slot is None:
        assert counted == sum(len(one) for one in memory)
    else:
        assert sum(adapters.layers.nbytes(some, through_slot=True)) == counted + len(slot)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and an adapter of it."""
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp())
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(checkpoint, folder)
    return checkpoint, folder


@pytest.mark.parametrize(
    ("dtypes", "kept"),
    [
        ([torch.float16] * 2, torch.float16),
        ([torch.bfloat16] * 2, torch.bfloat16),
        ([torch.float16, torch.bfloat16], torch.float32),
        ([torch.float8_e4m3fn] * 2, torch.float32),
        ([torch.float64] * 2, torch.float32),
    ],
)
def test_factors_are_kept_in_16_bits_where_the_file_has_them(
    saved: tuple[Path, Path], tmp_path: Path, dtypes: list[torch.dtype], kept: torch.dtype
) -> None:
    checkpoint, folder = saved
    copy = changed(folder, tmp_path / "x", {"lora_alpha": 6})
    tensors = load_file(copy / "adapter_model.safetensors")
    down, up = dtypes
    tensors = {name: x.to(down if ".lora_A." in name else up) for name, x in tensors.items()}
    save_file(tensors, copy / "adapter_model.safetensors")
    adapters = Adapters({"a": copy}, PlainRun(checkpoint, cpu).decoder.spec)
    adapters.load(adapters.layers.places, torch.device("cpu"), through_slot=False)
    one = adapters.layers[1]["mlp.down_proj"].each[0]
    assert one is not None
    assert one.down.dtype == one.up.dtype == kept
    a, b = (tensors[f"{LORA}layers.1.mlp.down_proj.lora_{x}.weight"].float() for x in "AB")
    assert torch.equal(one.down.float(), a)
    assert torch.equal(one.up.float().transpose(1, 2).flatten(0, 1), b)
    assert torch.equal(one.times, torch.full((len(one.times),), 6 / len(a)))


@pytest.mark.parametrize(("rank", "tokens"), [(4, 300), (64, 300), (64, 1)])
def test_what_a_gpu_computes_with_is_counted(
    rank: int, tokens: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp())
    for number, name in enumerate("ab"):
        save_adapter(checkpoint, tmp_path / name, number, r=rank)
    spec = PlainRun(checkpoint, cpu).decoder.spec
    adapters = Adapters({name: tmp_path / name for name in "ab"}, spec)
    adapters.load(adapters.layers.places, torch.device("cpu"), through_slot=False)
    which, most = torch.arange(tokens) % 3 - 1, 0
    for weight in layer_weights(spec, 0):
        if weight.name in adapters.layers[0]:
            assert weight.columns is not None
            x = torch.randn(tokens, weight.columns).half()
            norm = Norm(torch.ones(weight.columns), 1e-5)
            ranks, rows = adapters.layers[0][weight.name], slice(0, weight.rows)
            with Peak() as peak:
                reference.low_rank(x, ranks, which, rows, norm=norm)
            most = max(most, peak.most)
    counted = adapters.work_bytes(tokens, 0, tiled=False, on_gpu=True)
    assert most <= counted <= (4 if tokens > 1 else 1000) * most


def changed(folder: Path, to: Path, config: dict[str, Any], drop: str = "", add: str = "") -> Path:
    """A copy of an adapter with other fields and tensors."""
    to.mkdir()
    fields = json.loads((folder / "adapter_config.json").read_text()) | config
    (to / "adapter_config.json").write_text(json.dumps(fields))
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: x for name, x in tensors.items() if not drop or drop not in name}
    if add:
        kept[add] = torch.zeros(2, 2)
    save_file(kept, to / "adapter_model.safetensors")
    return to


@pytest.mark.parametrize(
    ("config", "drop", "add", "kind", "message"),
    [
        ({"use_dora": True}, "", "", UnsupportedModelError, "has DoRA; supported"),
        ({"peft_type": "IA3"}, "", "", UnsupportedModelError, "peft_type is 'IA3'"),
        ({"bias": "all"}, "", "", UnsupportedModelError, "bias is 'all'"),
        ({"modules_to_save": ["norm"]}, "", "", UnsupportedModelError, "modules_to_save"),
        ({"lora_alpha": "8"}, "", "", FormatError, "alpha is '8'"),
        ({"alpha_pattern": {"(": 1}}, "", "", FormatError, "alpha_pattern"),
        ({}, "1.mlp.up_proj.lora_B", "", FormatError, "mlp.up_proj has no lora_A and lora_B"),
        ({}, "", f"{LORA}embed_tokens.lora_A.weight", UnsupportedModelError, "embed_tokens, which"),
        ({}, "", f"{LORA}layers.0.norm.weight", UnsupportedModelError, "norm.weight; supported"),
    ],
)
def test_what_is_not_there_is_refused(
    saved: tuple[Path, Path],
    tmp_path: Path,
    config: dict[str, Any],
    drop: str,
    add: str,
    kind: type[QoffError],
    message: str,
) -> None:
    checkpoint, folder = saved
    spec = PlainRun(checkpoint, cpu).decoder.spec
    with pytest.raises(kind, match=message) as refusal:
        AdapterFile(changed(folder, tmp_path / "x", config, drop, add), spec)
    assert "\n" not in str(refusal.value)


def test_what_was_a_target_and_has_no_factors_is_nothing(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    """PEFT names parameters of experts for `all-linear`, also where a model has none."""
    checkpoint, folder = saved
    spec = PlainRun(checkpoint, cpu).decoder.spec
    config = {"target_parameters": ["mlp.experts.gate_up_proj"]}
    assert any(AdapterFile(changed(folder, tmp_path / "without", config), spec).layers)
    factor = f"{LORA}layers.0.mlp.experts.lora_A.weight"
    with pytest.raises(UnsupportedModelError, match="experts, which is no linear layer"):
        AdapterFile(changed(folder, tmp_path / "with", config, add=factor), spec)


def test_what_chooses_tokens_is_adapted(tmp_path: Path) -> None:
    config = {**TINY, **FAMILY["glm-5"]}
    spec = DecoderSpec.from_config(AutoConfig.for_model(**config).to_dict())
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    called = f"{LORA}layers.0.self_attn.indexer.wk"
    factors = {
        f"{called}.lora_A.weight": torch.ones(2, spec.hidden_size),
        f"{called}.lora_B.weight": torch.ones(64, 2),
    }
    save_file(factors, tmp_path / "adapter_model.safetensors")
    assert any(AdapterFile(tmp_path, spec).layers)


def test_adapters_of_matrices_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    config = {**TINY, **FAMILY["qwen3-next"]}  # four value heads: eight rows of b and a
    spec = DecoderSpec.from_config(AutoConfig.for_model(**config).to_dict())
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    called = f"{LORA}layers.0.linear_attn.in_proj_ba"
    factors = {
        f"{called}.lora_A.weight": torch.ones(2, 64),
        f"{called}.lora_B.weight": torch.ones(8, 2),
    }
    save_file(factors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"in_proj_ba, a matrix of 8 rows; .* of 16"):
        AdapterFile(tmp_path, spec)


def test_adapters_of_other_models_and_folders_without_one_are_refused(
    saved: tuple[Path, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")
    spec = PlainRun(other, cpu).decoder.spec
    with pytest.raises(ArgumentError, match="the adapter is of another model"):
        AdapterFile(saved[1], spec)
    with pytest.raises(FormatError, match="adapter_config"):
        AdapterFile(tmp_path, spec)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(FormatError, match=r"has no adapter_model\.safetensors; save the adapter"):
        adapter_config(tmp_path)
    with pytest.raises(ArgumentError, match="is no folder"):
        AdapterFile(tmp_path / "missing", spec)
    with pytest.raises(ArgumentError, match="there is no adapter 'b'; there are: 'a'"):
        Adapters({"a": saved[1]}, PlainRun(saved[0], cpu).decoder.spec).number("b")


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise OSError(errno.ENOMEM, "no more locked memory")

    monkeypatch.setattr(adapter_layers, "pinned_memory", refuse)
    with pytest.warns(UserWarning, match="cannot be pinned .no more locked memory"):
        assert adapter_layers._pinned(4096).nbytes == 4096
