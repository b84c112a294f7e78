"""Accelerate's functions, streaming: its results, and arguments refused that mean nothing here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import qoff.accelerate as ours
from qoff.errors import ArgumentError
from tests.hf.test_dispatch import LLAMA, model_of, results

LAYERS = [f"model.layers.{i}" for i in range(5)]
OUTER = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
MAP: dict[str, Any] = {
    **OUTER,
    "lm_head": "cpu",
    **dict(zip(LAYERS, ["cpu", "disk", "cpu", "disk", "disk"], strict=True)),
}


@pytest.mark.parametrize(
    "start",
    [
        lambda m, api, folder: api.cpu_offload(m, torch.device("cpu")),
        lambda m, api, folder: api.disk_offload(m, folder),
        lambda m, api, folder: api.dispatch_model(m, MAP, offload_dir=folder),
    ],
    ids=["cpu_offload", "disk_offload", "dispatch_model"],
)
def test_the_results_are_those_of_accelerate(start: Callable[..., Any], tmp_path: Path) -> None:
    wanted = results(start(model_of("llama"), accelerate, tmp_path / "theirs"))
    model = start(model_of("llama"), ours, tmp_path / "ours")
    assert any(p.is_meta for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(results(model), wanted, strict=True))


@pytest.mark.parametrize("device_map", ["auto", MAP, None])
def test_a_checkpoint_is_loaded_into_empty_weights(device_map: Any, tmp_path: Path) -> None:
    saved = model_of("llama")
    saved.save_pretrained(tmp_path / "saved", max_shard_size="200KB")
    with ours.init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).eval()
    size = sum(p.nbytes for p in saved.parameters())
    model = ours.load_checkpoint_and_dispatch(
        model,
        tmp_path / "saved",
        device_map=device_map,
        max_memory={"cpu": int(0.8 * size)},
        no_split_module_classes=["LlamaDecoderLayer"],
        offload_folder=tmp_path / "offloaded",
    )
    assert any(p.is_meta for p in model.parameters()) == (device_map is not None)
    assert all(torch.equal(a, b) for a, b in zip(results(model), results(saved), strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: ours.dispatch_model(m, {"": 0, "lm_head": 1}), "computes on one device"),
        (lambda m: ours.dispatch_model(m, OUTER), "says nothing of model.layers.0"),
        (lambda m: ours.dispatch_model(m, {"": "disk"}), "go to disk: say where with offload_f"),
        (lambda m: ours.load_checkpoint_and_dispatch(m, "x", "best"), "device_map is 'best'"),
        (lambda m: ours.load_checkpoint_and_dispatch(m, "/none", "auto"), "/none is not there"),
        (
            lambda m: ours.load_checkpoint_and_dispatch(m, "x", {}, broadcast_from_rank0=True),
            "broadcast_from_rank0 means nothing here",
        ),
    ],
)
def test_what_means_nothing_is_refused(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(model_of("llama"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"torch sees no GPU, and the device is 0; use 'cpu'"):
        ours.cpu_offload(model_of("llama"), execution_device=0)


def test_a_model_of_accelerate_is_refused() -> None:
    model = accelerate.cpu_offload(model_of("llama"), torch.device("cpu"))
    with pytest.raises(ArgumentError, match="is dispatched already; take that back first"):
        ours.cpu_offload(model)
