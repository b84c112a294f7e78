"""Experts that a conversion reads one by one are those that transformers' loader joins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qoff.errors import FormatError, QuantizationError
from qoff.models.convert.convert import convert, modules_source
from qoff.models.convert.expert_tensors import ExpertTensors, joined_experts
from qoff.models.convert.module_tensors import ModuleTensors
from qoff.models.convert.unconverted_modules import UnconvertedModules
from qoff.models.modules.structure import matrices_of
from qoff.models.sources import open_source
from tests.module_models import OWN_CACHES, module_source
from tests.tiny_models import QUANT

JOINED = [*OWN_CACHES, "jamba", "lara_mini"]


def opened(path: Path) -> UnconvertedModules:
    source = modules_source(open_source(path))
    assert source is not None
    return UnconvertedModules(source, source.config(), QUANT, False)


@pytest.mark.parametrize("name", JOINED)
def test_each_is_what_the_loader_has(base: Path, name: str) -> None:
    model, seen = opened(module_source(base, name)), 0
    tensors = model._tensors
    for unit in range(model.units - 1):
        places = model._layout.places(unit)
        whole = tensors.load(unit, places)
        for place in places:
            if (matrices_of(place) or [None])[0] is None or matrices_of(place)[0].expert is None:
                continue
            found = tensors.experts(place)
            assert found is not None
            for expert, wanted in enumerate(whole[place.name]):
                assert torch.equal(found[expert], wanted)
                seen += 1
    assert seen >= 8


def test_a_conversion_reads_no_layer_s_experts_together(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = ModuleTensors.load, list[str]()

    def noted(self: ModuleTensors, *arguments: object) -> dict[str, torch.Tensor]:
        found = load(self, *arguments)  # type: ignore[arg-type]
        loaded.extend(found)
        return found

    monkeypatch.setattr(ModuleTensors, "load", noted)
    convert(module_source(base, "deepseek_v4"), tmp_path / "out", quant=QUANT)
    assert any(name.endswith("shared_experts.down_proj.weight") for name in loaded)
    assert not [name for name in loaded if ".mlp.experts." in name]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda x: x[:, :-1],
            FormatError,
            r"expert 1 of .*down_proj is \[64, 95\], not \[64, 96\]",
        ),
        (lambda x: x / 0, QuantizationError, r"down_proj, expert 1: holds NaN or infinity"),
    ],
)
def test_what_does_not_fit_is_named(
    base: Path, tmp_path: Path, change: object, error: type[Exception], message: str
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for file in module_source(base, "deepseek_v4").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.ffn.experts.1.w2.weight"
    tensors[name] = change(tensors[name]).contiguous()  # type: ignore[operator]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out", quant=QUANT)


def test_what_only_the_loader_knows_to_make_is_left_to_it(base: Path) -> None:
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    source = modules_source(open_source(module_source(base, "axk2")))
    assert source is not None
    names = {"a": ["a.0", "a.1"], "b": ["b.0", "b.1"]}

    def found(count: int, *operations: object) -> ExpertTensors | None:
        converter = WeightConverter(["a", "b"], "c", operations=[*operations])
        return joined_experts(source, "c", (count, 8, 4), names, [converter])

    assert found(2, MergeModulelist(0), Concatenate(1)) is not None
    assert found(3, MergeModulelist(0), Concatenate(1)) is None
    assert found(2, MergeModulelist(0), Concatenate(2)) is None
    assert found(2, Concatenate(0)) is None
    assert joined_experts(source, "c", (2, 8, 4), names, []) is None
