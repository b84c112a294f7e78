"""A model in memory that streams computes as before, bit for bit."""

from __future__ import annotations

import gc
import io
import json
import re
import threading
import weakref
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import qoff
from qoff.errors import ArgumentError, BudgetError, StreamedError
from qoff.hf.dispatch.units import UnitPlace, units_of
from tests.tiny_families import TINY
from tests.tolerances import RELATIVE_RMS, assert_close

SIZES = {**TINY, "num_hidden_layers": 5}
LLAMA = {**SIZES, "model_type": "llama"}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (AutoModelForCausalLM, LLAMA),
    "tied": (AutoModelForCausalLM, {**LLAMA, "tie_word_embeddings": True}),
    "mixtral": (AutoModelForCausalLM, {**SIZES, "model_type": "mixtral", "num_local_experts": 4}),
    "mamba2": (
        AutoModelForCausalLM,
        {**SIZES, "model_type": "mamba2", "num_heads": 4, "head_dim": 32, "n_groups": 1},
    ),
    "bert": (AutoModel, {**SIZES, "model_type": "bert", "hidden_act": "gelu"}),
    "odd": (AutoModelForCausalLM, {**SIZES, "model_type": "gpt2", "n_layer": 5, "n_inner": 37}),
    "t5": (
        AutoModelForSeq2SeqLM,
        {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3,
         "num_heads": 4, "vocab_size": 128, "decoder_start_token_id": 0},
    ),
    "modernvbert": (  # calls the embeddings of its text model, a class that is not split, itself
        AutoModel,
        {"model_type": "modernvbert",
         "text_config": {**SIZES, "model_type": "modernbert", "num_attention_heads": 4},
         "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "image_size": 32, "patch_size": 16}},
    ),
}  # fmt: skip
HALF = {"tied": torch.bfloat16, "mixtral": torch.float16}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    auto, config = MODELS[name]
    made: Any = auto
    model = made.from_config(AutoConfig.for_model(**config), dtype=HALF.get(name, torch.float32))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1)
    return model.eval()


@torch.no_grad()
def results(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 128, (2, 7))
    more = {"decoder_input_ids": ids[:, :3]} if model.config.is_encoder_decoder else {}
    found = [model(ids, **more)[0]]
    if hasattr(model, "lm_head"):
        found.append(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0))
    return found


def least_of(model: Any) -> tuple[int, int]:
    """The least bytes of a device, and those of all."""
    with pytest.raises(BudgetError) as refusal:
        qoff.dispatch(model, device="cpu", device_memory=0)
    found = re.search(r"weights take ([\d,]+), of ([\d,]+) in all", str(refusal.value))
    assert found is not None
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


@pytest.mark.parametrize("place", ["host", "disk", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_same_bits(name: str, place: str, tmp_path: Path) -> None:
    model = model_of(name)
    wanted = results(model)
    least, everything = least_of(model)
    assert least < everything
    host = {"host": None, "disk": 0, "both": (everything - least) // 2}[place]
    same = qoff.dispatch(
        model, device="cpu", device_memory=least, host_memory=host, offload_folder=tmp_path
    )
    assert same is model
    assert json.loads(json.dumps(model.hf_device_map))[""] == "cpu:0"
    places = set(model.hf_device_map.values()) - {"cpu:0"}
    assert {"host": {"cpu"}, "disk": {"disk"}, "both": {"cpu", "disk"}}[place] == places
    for one, other in zip(results(model), wanted, strict=True):
        assert torch.equal(one, other)


def test_what_fits_stays(tmp_path: Path) -> None:
    model = model_of("llama")
    wanted, (least, everything) = results(model), least_of(model)
    qoff.dispatch(model, device="cpu", device_memory=everything)
    assert not any(p.is_meta for p in model.parameters())
    room = (least + everything) // 2
    qoff.dispatch(model, device="cpu", device_memory=room, host_memory=0, offload_folder=tmp_path)
    there = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    assert least / 2 < there < room
    assert all(torch.equal(a, b) for a, b in zip(results(model), wanted, strict=True))


def test_files_go_with_the_model(tmp_path: Path) -> None:
    model, threads = model_of("llama"), set(threading.enumerate())
    least, _ = least_of(model)
    qoff.dispatch(model, device="cpu", device_memory=least, host_memory=0, offload_folder=tmp_path)
    assert len(list(tmp_path.glob("qoff-*/weights/model-layer-*"))) == 5
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not list(tmp_path.iterdir())
    assert set(threading.enumerate()) <= threads


def test_weights_leave_the_model_one_unit_after_another() -> None:
    model = model_of("llama")
    before = [weakref.ref(p.untyped_storage()) for p in model.model.layers.parameters()]
    qoff.dispatch(model, device="cpu", device_memory=least_of(model)[0])
    gc.collect()
    assert not any(x() for x in before)


def test_it_has_no_gradients_and_can_be_neither_copied_nor_saved() -> None:
    model = model_of("llama")
    qoff.dispatch(model, device="cpu", device_memory=least_of(model)[0])
    assert not model(torch.ones(1, 3, dtype=torch.int64)).logits.requires_grad
    with pytest.raises(ArgumentError, match="no backward pass"):
        model(inputs_embeds=torch.zeros(1, 3, 64, requires_grad=True))
    with pytest.raises(ArgumentError, match="neither copied nor pickled"):
        deepcopy(model)
    for saved in (model, model.model):
        with pytest.raises(ArgumentError, match="cannot be saved"):
            saved.save_pretrained("/nonexistent")
    with pytest.raises(ArgumentError, match="cannot be saved"):
        torch.save(model.state_dict(), io.BytesIO())


def test_adapters_of_peft_come_with_layers(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    tuned = peft.get_peft_model(model_of("llama"), config).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    model = model_of("llama")
    options: Any = {"host_memory": 0, "offload_folder": tmp_path / "layers"}
    qoff.dispatch(model, device="cpu", device_memory=least_of(model)[0], **options)
    same = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted, found = (m(torch.ones(1, 3, dtype=torch.int64)).logits for m in (tuned, same))
    assert_close(found, wanted, tolerance=RELATIVE_RMS[torch.float32])
    same.save_pretrained(tmp_path / "again")
    for name in ("adapter", "again"):
        assert (tmp_path / name / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("assign", [False, True])
def test_nothing_is_loaded_into_weights_that_stream(assign: bool) -> None:
    model = model_of("llama")
    kept = model.state_dict()
    given = {name: 2 * x for name, x in kept.items()}
    wanted = results(model)
    qoff.dispatch(model, device="cpu", device_memory=least_of(model)[0])
    with pytest.raises(StreamedError, match=r"model\.layers\.\d\.\S+ streams, and nothing can be"):
        model.load_state_dict(given, assign=assign)
    assert torch.equal(model.model.embed_tokens.weight, kept["model.embed_tokens.weight"])
    given = dict(kept)
    stays = {"model.norm.weight": given["model.norm.weight"]}
    model.load_state_dict(stays, strict=False, assign=assign)
    model.load_state_dict(model.state_dict(), assign=assign)  # as it is
    assert all(map(torch.equal, results(model), wanted))


def test_a_weight_that_is_set_into_a_layer_that_streams_is_not_lost(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = model_of("llama")
    model.save_pretrained(tmp_path)
    wanted = results(model)
    qoff.dispatch(model, device="cpu", device_memory=least_of(model)[0])
    with pytest.raises(StreamedError, match="streams, and nothing can be loaded into it"):
        accelerate.load_checkpoint_in_model(model, str(tmp_path), device_map={"": "cpu"})
    projection = model.model.layers[1].mlp.down_proj
    streaming = projection.weight
    projection.weight = nn.Parameter(torch.zeros(streaming.shape), requires_grad=False)
    for _ in range(2):
        with pytest.raises(StreamedError, match="another weight was set; the layer streams"):
            results(model)
    projection._parameters["weight"] = streaming
    assert all(map(torch.equal, results(model), wanted))


def test_weights_are_taken_back_where_putting_them_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    wanted = results(model)
    qoff.dispatch(model, device="cpu", device_memory=least_of(model)[0])
    put = UnitPlace.put

    def interrupted(place: UnitPlace, values: Sequence[Tensor]) -> None:
        put(place, values)
        if values is not place.empty:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UnitPlace, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            results(model)
    assert all(map(torch.equal, results(model), wanted))


def test_adapters_that_begin_with_the_weights_come_before(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = torch.ones(1, 3, dtype=torch.int64)
    for how in ({"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}):
        config = peft.LoraConfig(r=2, target_modules="all-linear", **how)
        model = model_of("llama")
        qoff.dispatch(model, device="cpu", device_memory=least_of(model)[0])
        with pytest.raises(StreamedError, match=r"are added before qoff\.dispatch"):
            peft.get_peft_model(model, config)
        tuned = peft.get_peft_model(model_of("llama"), config).eval()
        with torch.no_grad():
            wanted = tuned(ids).logits
            qoff.dispatch(tuned, device="cpu", device_memory=least_of(tuned)[0])
            assert torch.equal(tuned(ids).logits, wanted)


def test_a_learned_prefix_is_used_and_has_no_gradients(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ids = torch.tensor([[5, 6, 7, 8]])
    tuned = peft.get_peft_model(model_of("llama"), config).eval()
    torch.nn.init.normal_(tuned.prompt_encoder["default"].embedding.weight)
    tuned.save_pretrained(tmp_path / "prefix")
    model = model_of("llama")
    qoff.dispatch(model, device="cpu", device_memory=sum(least_of(model)) // 2)
    assert {*model.hf_device_map.values()} == {"cpu:0", "cpu"}  # some layers stay
    same = peft.PeftModel.from_pretrained(model, tmp_path / "prefix").eval()
    options: Any = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(same(ids).logits, tuned(ids).logits)
        assert torch.equal(
            same.generate(input_ids=ids, **options), tuned.generate(input_ids=ids, **options)
        )
    learns = peft.get_peft_model(model, config)
    with pytest.raises(StreamedError, match="no backward pass"):
        learns(ids, labels=ids)


def test_it_is_neither_cast_nor_moved(tmp_path: Path) -> None:
    model = model_of("llama")
    whole = model.get_memory_footprint()
    wanted = results(model)
    options: Any = {"host_memory": 0, "offload_folder": tmp_path}
    qoff.dispatch(model, device="cpu", device_memory=least_of(model)[0], **options)
    for same in (model.to("cpu"), model.float(), model.cpu(), nn.Sequential(model).to("cpu")[0]):
        assert same is model
    for part in (model.model, model.model.layers, model.model.layers[1]):
        assert part.to("cpu") is part
    casts = (model.half, model.model.half, model.model.layers[1].half, nn.Sequential(model).double)
    for cast in (*casts, lambda: model.to(torch.bfloat16)):
        with pytest.raises(ArgumentError, match=r"load it again with dtype=torch\."):
            cast()
    for kind in (ArgumentError, RuntimeError):  # Accelerate's is the latter
        with pytest.raises(kind, match="moved from cpu to meta"):
            model.to("meta")
    assert all(map(torch.equal, results(model), wanted))
    assert model.get_memory_footprint() < whole


def test_what_cannot_stream_is_refused(tmp_path: Path) -> None:
    model = model_of("llama")
    least, _ = least_of(model)
    small = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**LLAMA, "num_hidden_layers": 2})
    )
    with pytest.raises(BudgetError, match=r"its weights take ([\d,]+), and no less .* to that"):
        qoff.dispatch(small, device="cpu", device_memory=0)
    with pytest.raises(ArgumentError, match=r"5 layers of [\d,]+ bytes go to disk: say where"):
        qoff.dispatch(model, device="cpu", device_memory=least, host_memory=0)
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"offload_folder: .*choose another place"):
        qoff.dispatch(
            model,
            device="cpu",
            device_memory=least,
            host_memory=0,
            offload_folder=tmp_path / "file",
        )
    qoff.dispatch(model, device="cpu", device_memory=least)
    with pytest.raises(ArgumentError, match="it streams already, or was never loaded"):
        qoff.dispatch(model, device="cpu")
    whole = nn.Linear(3, 3).to(torch.float8_e4m3fn)
    with pytest.raises(ArgumentError, match=r"of torch.float8_e4m3fn; only parameters of float64"):
        qoff.dispatch(whole, device="cpu")
    assert units_of(nn.Linear(3, 3)) == []


class Positions(nn.Module):
    """Gives rows of its weight themselves away, as tables of positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(64, 32))

    def forward(self, length: int) -> Tensor:
        return self.rows[:length]


def test_weights_that_a_layer_returns_stay_as_they_are(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ModuleList(Positions() for _ in range(5)))
    wanted = [layer.rows[:3].clone() for layer in model[1]]
    options: Any = {"host_memory": 0, "offload_folder": tmp_path}
    qoff.dispatch(model, device="cpu", device_memory=least_of(model)[0], **options)
    found = [layer(3) for layer in model[1]]
    assert all(map(torch.equal, found, wanted))
