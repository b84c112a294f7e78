"""`from_pretrained` of a qoff checkpoint with a device map that offloads: layers stream."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import WeightFile, tensors_of
from qoff.errors import ArgumentError, BudgetError, QoffError
from qoff.hf.plugin.streaming import Streaming
from qoff.memory import WeightStore
from qoff.models.convert.convert import convert
from tests.hf.plugin_models import IDS, load
from tests.tiny_models import QUANT, save_model, tiny_checkpoint


def generated(model: Any) -> Tensor:
    return model.generate(IDS, max_new_tokens=8, do_sample=False)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[WeightStore]:
    """The weight stores of models that are loaded."""
    found: list[WeightStore] = []
    start = Streaming.start
    monkeypatch.setattr(Streaming, "start", lambda self: found.append(start(self)))
    return found


# Fused rows in blocks, biases and an embedding of positions, experts, a router with a buffer, one
# that transformers fills from outside.
@pytest.mark.parametrize(
    "family",
    ["phi3", "opt", "gpt-oss", "deepseek-v3", "qwen3-next", "kimi-linear", "ling3", "olmo-hybrid"],
)
def test_streamed_layers_generate_the_same(
    base: Path, stores: list[WeightStore], family: str
) -> None:
    path = tiny_checkpoint(base, family)
    model, resident = load(path, device_map="disk", offload_folder="unused"), load(path)
    assert torch.equal(generated(model), generated(resident))
    layers = Checkpoint.open(path).layers
    assert list(model.hf_device_map.values()) == ["cpu:0", *["disk"] * len(layers)]
    (store,) = stores
    assert store.stats.arena_peak == store.arena.capacity
    assert store.residency.resident == frozenset()
    assert store.stats.bytes_read > sum(file.nbytes for file in layers)
    matrices = {n: x for n, x in model.named_buffers() if n.endswith("codes")}
    inside = {n for n in matrices if n.startswith(tuple(model.hf_device_map)[1:])}
    assert inside == {n for n, x in matrices.items() if x.device.type == "meta"} != set()


def test_max_memory_bounds_weights(tmp_path: Path, stores: list[WeightStore]) -> None:
    path = tmp_path / "deep"
    save_model(tmp_path / "model", "llama", num_hidden_layers=6)
    convert(tmp_path / "model", path, quant=QUANT, for_cpu=True)
    wanted = generated(load(path))
    with pytest.raises(BudgetError, match="raise it to that") as refusal:
        load(path, device_map="auto", max_memory={"cpu": "30KB"})
    least = int(str(refusal.value).split("takes ")[1].split(":")[0].replace(",", ""))
    layers = Checkpoint.open(path).layers
    more = max(tensor_bytes(file) for file in layers)
    for budget, streamed in ((least, len(layers)), (least + more, len(layers) - 1)):
        model = load(path, device_map="auto", max_memory={"cpu": budget})
        assert torch.equal(generated(model), wanted)
        stay = len(layers) - streamed
        places = sorted(model.hf_device_map.values())
        assert places == ["cpu:0", *["cpu:0"] * stay, *["disk"] * streamed]
        held = [x for x in (*model.parameters(), *model.buffers()) if x.device.type != "meta"]
        nbytes = stores[-1].stats.arena_peak + sum(x.nbytes for x in held)
        assert model.get_memory_footprint() == nbytes <= budget


def test_a_learned_prefix_is_used(base: Path, tmp_path: Path) -> None:
    """PEFT looks up where each layer computes, and takes no CPU for that unless it is "cpu:0"."""
    peft = pytest.importorskip("peft")
    path = tiny_checkpoint(base, "llama")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(load(path), config).eval()
    torch.nn.init.normal_(tuned.prompt_encoder["default"].embedding.weight)
    tuned.save_pretrained(tmp_path / "prefix")
    model = load(path, device_map={"": "cpu", "model.layers.1": "disk"})
    same = peft.PeftModel.from_pretrained(model, tmp_path / "prefix").eval()
    with torch.no_grad():
        assert torch.equal(same(IDS).logits, tuned(IDS).logits)


def tensor_bytes(file: WeightFile) -> int:
    return sum(t.nbytes for entry in file.weights.values() for t in tensors_of(entry))


def test_what_cannot_be_done_with_streamed_layers(base: Path, tmp_path: Path) -> None:
    path = tiny_checkpoint(base, "llama")
    model = load(path, device_map={"": "cpu", "model.layers.1": "disk"})
    others = dict.fromkeys((f"model.layers.{i}" for i in range(len(model.model.layers))), "cpu:0")
    assert model.hf_device_map == {"": "cpu:0", **others, "model.layers.1": "disk"}
    wanted = generated(model)
    with pytest.raises(ArgumentError, match="no backward pass"):
        model(inputs_embeds=torch.zeros(1, 2, model.config.hidden_size, requires_grad=True))
    for refuse in (lambda: model.save_pretrained(tmp_path), model.dequantize):
        with pytest.raises(ArgumentError, match="load it without offloading"):
            refuse()
    with pytest.raises(ArgumentError, match="neither copied nor pickled"):
        copy.deepcopy(model)
    assert model.to("cpu") is model
    with pytest.raises(ArgumentError, match=r"load it again with dtype=torch\.float16"):
        model.to(torch.float16)
    layer = model.model.layers[1]
    with pytest.raises(QoffError):
        layer.self_attn.q_proj(torch.zeros(1, model.config.hidden_size))

    seen: list[BaseException] = []

    def elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()

    def in_thread() -> None:
        try:
            generated(model)
        except ArgumentError as error:
            seen.append(error)

    hook = layer.self_attn.register_forward_pre_hook(elsewhere)
    with torch.no_grad():
        model(IDS)
    hook.remove()
    assert "one forward pass at a time" in str(seen[0])
    assert torch.equal(generated(model), wanted)


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp"])
def test_other_modules_are_not_offloaded(base: Path, name: str) -> None:
    path = tiny_checkpoint(base, "llama")
    with pytest.raises(ArgumentError, match=f"{name} is offloaded to disk, but only whole"):
        load(path, device_map={"": "cpu", name: "disk"})
