"""Adapters in the native decoder: PEFT's logits, row by row, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qoff.errors import ArgumentError, FormatError, QoffError, UnsupportedModelError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.ragged import Ragged
from qoff.models.adapters import AdapterFile, Adapters
from qoff.models.forward_pass import ForwardPass
from tests.adapters import save_adapter
from tests.tiny_models import PlainRun, reference_model, tiny_checkpoint
from tests.tolerances import DECODER_LOGITS, LINEAR_LOGITS, assert_close

PROMPTS = [torch.tensor(p) for p in ([5, 6, 7, 8, 9, 10], [11, 12, 20], [21, 22, 23, 24])]
FAMILIES = ["llama", "llama-biased", "phi3", "gpt-neox", "gemma2", "cohere", "granite", "opt-350m"]
FAMILIES += ["qwen3.5"]


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
    models["all"] = save_adapter(checkpoint, tmp_path / "all", 1, lora_alpha=6)
    layer = {"phi3": "qkv_proj", "gpt-neox": "query_key_value"}.get(family, "v_proj")
    few = {"r": 3, "target_modules": [layer], "use_rslora": True}
    few |= {"alpha_pattern": {f"layers.1.*{layer}": 11}, "rank_pattern": {f"0.*{layer}": 5}}
    models["few"] = save_adapter(checkpoint, tmp_path / "few", 2, **few)
    run = PlainRun(checkpoint, cpu)
    spec = run.decoder.spec
    adapters = Adapters({name: tmp_path / name for name in ("all", "few")}, spec)
    adapters.load()
    each = ["few", None, "all"]
    tolerance = DECODER_LOGITS if spec.linear is None else LINEAR_LOGITS
    found = logits(run, adapters, each).split([len(p) for p in PROMPTS])
    with torch.no_grad():
        for name, prompt, mine in zip(each, PROMPTS, found, strict=True):
            assert_close(mine, models[name](prompt[None]).logits[0], tolerance=tolerance)
    plain = logits(run, None, each).split([len(p) for p in PROMPTS])
    assert torch.equal(found[1], plain[1])
    assert not torch.allclose(found[0], plain[0], rtol=0.01)
    last = torch.tensor([len(p) for p in PROMPTS]).cumsum(0) - 1
    assert torch.equal(logits(run, adapters, each, last), torch.cat(found)[last])
    loaded = [one for layer in adapters._layers for x in layer.values() for one in x.each if one]
    assert adapters.nbytes == sum(x.nbytes for one in loaded for x in (one.down, one.up, one.first))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and an adapter of it."""
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp())
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(checkpoint, folder)
    return checkpoint, folder


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


LORA = "base_model.model.model."


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


def test_adapters_of_other_models_and_folders_without_one_are_refused(
    saved: tuple[Path, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")
    spec = PlainRun(other, cpu).decoder.spec
    with pytest.raises(ArgumentError, match="the adapter is of another model"):
        AdapterFile(saved[1], spec)
    with pytest.raises(FormatError, match="adapter_config"):
        AdapterFile(tmp_path, spec)
    with pytest.raises(ArgumentError, match="is no folder"):
        AdapterFile(tmp_path / "missing", spec)
    with pytest.raises(ArgumentError, match="there is no adapter 'b'; there are: 'a'"):
        Adapters({"a": saved[1]}, PlainRun(saved[0], cpu).decoder.spec).number("b")
