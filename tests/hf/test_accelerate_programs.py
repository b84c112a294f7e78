"""What programs for Accelerate do, with another import: any module, any map, any checkpoint."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import offload_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

import qoff
import qoff.accelerate as ours
from qoff.errors import ArgumentError
from qoff.hf.dispatch.values import Values
from tests.hf.test_dispatch import model_of, results
from tests.tolerances import RELATIVE_RMS, assert_close

CPU = torch.device("cpu")
WHOLE = ["Shortcut"]


class Shortcut(nn.Module):
    """Uses the weight of a module that it does not call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.inner.weight.t()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


class Net(nn.Module):
    """Layers in a list, other modules, parameters of its own and buffers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.start = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.bn = nn.BatchNorm1d(width)
        self.end = Shortcut(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x) * self.scale
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.end(self.bn(x))
        return y


BLOCKS = [f"blocks.{i}" for i in range(4)]
AWAY = {"": "disk", "start": "cpu", "blocks.1": "cpu", "blocks.2.up": "cpu"}


def net() -> Net:
    torch.manual_seed(0)
    made = Net().eval()
    with torch.no_grad():
        for x in [*made.parameters(), made.bn.running_mean]:
            assert isinstance(x, Tensor)
            x.normal_(std=0.3)
    return made


def chain() -> nn.Module:
    """A model without lists of layers."""
    return nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)))


def output(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        y: Tensor = model(torch.randn(3, 16))
    return y


def empty(buffers: bool = False) -> Net:
    with ours.init_empty_weights(include_buffers=buffers):
        return Net().eval()


@pytest.fixture(params=["safetensors", "bin", "before 1.6", "shards"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    weights = net().state_dict()
    path = tmp_path / "checkpoint"
    path.mkdir()
    if request.param == "safetensors":
        save_file(weights, path / "any.safetensors")
        return path / "any.safetensors"
    if request.param != "shards":
        old = request.param != "bin"
        torch.save(weights, path / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
        return path
    index = {name: f"{i % 3}.bin" for i, name in enumerate(weights)}
    for file in set(index.values()):
        torch.save({n: x for n, x in weights.items() if index[n] == file}, path / file)
    (path / "index.json").write_text(json.dumps(index))
    return path / "index.json"


@pytest.mark.parametrize("device_map", ["auto", AWAY, {"": "cpu"}, None], ids=str)
def test_every_form_of_checkpoint_is_loaded(
    checkpoint: Path, device_map: Any, tmp_path: Path
) -> None:
    model = ours.load_checkpoint_and_dispatch(
        empty(),
        checkpoint,
        device_map=device_map,
        no_split_module_classes=["Block"],
        max_memory={"cpu": "18KB"},
        offload_folder=tmp_path / "offloaded",
        offload_state_dict=True,
        offload_buffers=True,
        skip_keys="past_key_values",
        preload_module_classes=WHOLE,
    )
    assert torch.equal(output(model), output(net()))
    assert any(p.is_meta for p in model.parameters()) == (device_map in ("auto", AWAY))


@pytest.mark.parametrize("make", [net, chain])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_all_modules_stream(make: Any, place: str, tmp_path: Path) -> None:
    model = make()
    wanted = output(model)
    if place == "host":
        ours.cpu_offload(model, CPU, preload_module_classes=WHOLE)
    else:
        ours.disk_offload(model, tmp_path, CPU)
    layers = model.blocks if make is net else model
    assert all(p.is_meta for p in layers.parameters())
    assert torch.equal(output(model), wanted)


@pytest.mark.parametrize(
    "device_map",
    [
        AWAY,
        {"": "disk"},
        {"start": "disk", "scale": "cpu", "blocks": "cpu", "bn": "cpu", "end": "disk"},
        {"": "cpu", "blocks.0.up": "disk", "blocks.0.down.bias": "disk"},
    ],
    ids=str,
)
def test_a_map_may_name_anything(device_map: dict[str, str], tmp_path: Path) -> None:
    model = net()
    wanted = output(model)
    ours.dispatch_model(model, device_map, offload_dir=tmp_path, preload_module_classes=WHOLE)
    assert model.hf_device_map == device_map
    assert torch.equal(output(model), wanted)
    for name, p in model.named_parameters():
        above = [key for key in device_map if not key or f"{name}.".startswith(f"{key}.")]
        if name != "scale" and device_map[max(above, key=len)] == "disk":  # the model's own stays
            assert p.is_meta


@pytest.mark.parametrize("whole", [["Block"], None])
def test_a_map_that_accelerate_infers_is_followed(whole: Any, tmp_path: Path) -> None:
    """The weights on disk are those that Accelerate itself wrote, in a second step."""
    save_file(net().state_dict(), tmp_path / "model.safetensors")
    model = empty()
    device_map = ours.infer_auto_device_map(
        model, max_memory={"cpu": "9KB"}, no_split_module_classes=whole
    )
    assert "disk" in device_map.values()
    folder = tmp_path / "offloaded"
    ours.load_checkpoint_in_model(model, tmp_path, device_map, folder, offload_buffers=True)
    options: Any = {"offload_buffers": True, "preload_module_classes": WHOLE}
    ours.dispatch_model(model, device_map, offload_dir=folder, **options)
    assert torch.equal(output(model), output(net()))


def test_weights_come_from_a_state_dict_an_index_or_a_folder(tmp_path: Path) -> None:
    weights = net().state_dict()
    save_file(weights, tmp_path / "file.safetensors")
    index = {n: {"safetensors_file": tmp_path / "file.safetensors"} for n in weights}
    offload_state_dict(tmp_path / "there", weights)
    options: Any = {"offload_dir": tmp_path, "preload_module_classes": WHOLE}
    for model in (
        ours.cpu_offload(empty(), CPU, state_dict=weights),
        ours.dispatch_model(empty(), {"": "disk"}, state_dict=weights, **options),
        ours.dispatch_model(empty(True), {"": "disk"}, offload_index=index, **options),
        ours.disk_offload(empty(True), tmp_path / "there"),
    ):
        assert torch.equal(output(model), output(net()))


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_removing_hooks_gives_the_model_back(place: str, tmp_path: Path) -> None:
    model = net()
    wanted = output(model)
    for buffers in (False, True):
        if place == "cpu":
            ours.cpu_offload(model, CPU, offload_buffers=buffers)
        else:
            ours.disk_offload(model, tmp_path, offload_buffers=buffers)
        assert torch.equal(output(model), wanted)
        remove_hook_from_submodules(model)
        assert not list(tmp_path.iterdir())
        assert torch.equal(output(model), wanted)
        assert not hasattr(model, "hf_device_map")
    model.double().float()
    model(torch.randn(3, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_peft_loads_an_adapter_into_a_model_that_streams(way: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    tuned = peft.get_peft_model(model_of("llama"), config).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    given = {
        "cpu_offload": (CPU,),
        "disk_offload": (tmp_path, CPU),
        "dispatch_model": ({"": "cpu", "model.layers.1": "disk"}, None, None, tmp_path),
    }[way]
    model = getattr(ours, way)(model_of("llama"), *given)
    away = sum(p.is_meta for p in model.parameters())
    if way == "dispatch_model":
        del model.hf_device_map
    assert not hasattr(model, "hf_device_map")
    same = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert sum(p.is_meta for p in same.parameters()) == away > 0
    ids = torch.ones(1, 3, dtype=torch.int64)
    with torch.no_grad():
        assert_close(same(ids).logits, tuned(ids).logits, tolerance=RELATIVE_RMS[torch.float32])


def test_weights_that_are_not_there_are_no_numbers(tmp_path: Path) -> None:
    model = ours.dispatch_model(net(), {"": "disk"}, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match="name the class of the first in no_split_modules"):
        output(model)
    stored = ours.disk_offload(nn.Sequential(Stored()), tmp_path, CPU, offload_buffers=True)
    with pytest.raises(ArgumentError, match="name the class of the first in no_split_modules"):
        _ = torch.ones(1, 16) @ stored[0].scale


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_the_model_does_not_keep_what_streams(place: str, tmp_path: Path) -> None:
    model = chain()
    before = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    if place == "cpu":
        ours.cpu_offload(model, CPU)
    else:
        ours.disk_offload(model, tmp_path, CPU)
    gc.collect()
    assert not any(x() for x in before)


def test_buffers_stream_if_they_shall(tmp_path: Path) -> None:
    model = net()
    wanted = output(model)
    options: Any = {"offload_buffers": True, "preload_module_classes": WHOLE}
    ours.dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, **options)
    assert model.bn.running_mean is not None
    assert model.bn.running_mean.is_meta
    assert torch.equal(output(model), wanted)


class Stored(nn.Module):
    """Its weights are buffers, as those of quantized layers."""

    def __init__(self, kept: bool = True) -> None:
        super().__init__()
        self.register_buffer("codes", torch.arange(256, dtype=torch.uint8).reshape(16, 16))
        self.register_buffer("scale", torch.full((16, 1), 2**-7), persistent=kept)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        assert isinstance(self.codes, Tensor)
        return x @ (self.codes * self.scale).t()


def test_modules_of_buffers_alone_stream_if_they_shall(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Stored(), Stored(kept=False))
    wanted = output(model)
    device_map = {"0": "cpu", "1": "disk", "2": "disk"}
    ours.dispatch_model(model, device_map, offload_dir=tmp_path, offload_buffers=True)
    assert {n for n, x in model.named_buffers() if x.is_meta} == {"1.codes", "1.scale", "2.codes"}
    assert torch.equal(output(model), wanted)


def test_tied_weights_stream_where_all_of_them_do(tmp_path: Path) -> None:
    model = model_of("tied")
    wanted = results(model)
    outer = {"model.norm": "cpu", "lm_head": "disk", "model.layers": "cpu"}
    ours.dispatch_model(model, {**outer, "model.embed_tokens": "disk"}, offload_dir=tmp_path)
    assert model.lm_head.weight.is_meta
    assert model.model.embed_tokens.weight.is_meta
    assert all(map(torch.equal, results(model), wanted))
    model = model_of("tied")
    ours.dispatch_model(model, {**outer, "model.embed_tokens": "cpu"}, offload_dir=tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(map(torch.equal, results(model), wanted))


def test_a_checkpoint_passes_through_memory_by_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been read and is still held, whenever a weight is read, is less than two layers."""
    with torch.no_grad():
        saved = nn.Sequential(*[nn.Linear(32, 32) for _ in range(9)])
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    with ours.init_empty_weights():
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(9)])
    held: list[weakref.ref[Tensor]] = []
    most = 0

    def of(self: Values, x: Tensor, own: Any = Values.of) -> Tensor:
        nonlocal most
        value: Tensor = own(self, x)
        held.append(weakref.ref(value))
        gc.collect()
        most = max(most, sum(x.nbytes for x in (ref() for ref in held) if x is not None))
        return value

    monkeypatch.setattr(Values, "of", of)
    ours.load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"}, offload_folder=tmp_path)
    monkeypatch.undo()
    layer = sum(p.nbytes for p in saved[0].parameters())
    assert 0 < most <= 2 * layer < 9 * layer
    x = torch.randn(2, 32)
    assert torch.equal(model(x), saved(x))


def test_memory_of_a_cpu_is_one_bound(tmp_path: Path) -> None:
    """What has no room in "cpu" is not kept in host memory, which is the same."""
    model = model_of("llama")
    size = sum(p.nbytes for p in model.parameters())
    with pytest.raises(ArgumentError, match="go to disk: say where with offload_folder"):
        qoff.dispatch(model, device="cpu", max_memory={"cpu": int(0.8 * size)})
    folder = {"offload_folder": tmp_path}
    qoff.dispatch(model, device="cpu", max_memory={"cpu": int(0.8 * size)}, **folder)
    assert "disk" in model.hf_device_map.values()


def test_a_dtype_is_that_of_all_that_is_loaded(tmp_path: Path) -> None:
    save_file(net().state_dict(), tmp_path / "model.safetensors")
    for device_map in ({"": "cpu"}, {"": "disk"}):
        model = ours.load_checkpoint_and_dispatch(
            empty(),
            tmp_path,
            device_map,
            dtype="float16",
            offload_folder=tmp_path / "offloaded",
            preload_module_classes=WHOLE,
        )
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        x = torch.randn(3, 16).half()
        assert torch.equal(model(x), net().half()(x))


def test_doubles_stream(tmp_path: Path) -> None:
    model, x = net().double(), torch.randn(3, 16, dtype=torch.float64)
    wanted = model(x)
    ours.disk_offload(model, tmp_path)
    assert torch.equal(model(x), wanted)


def test_one_place_leaves_a_model_that_learns(tmp_path: Path) -> None:
    save_file(net().state_dict(), tmp_path / "model.safetensors")
    model = ours.load_checkpoint_and_dispatch(Net(), tmp_path, {"": "cpu"}, force_hooks=True)
    model(torch.randn(3, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def others() -> Iterator[tuple[dict[str, Tensor], bool, str]]:
    weights = net().state_dict()
    yield {n: x for n, x in weights.items() if n != "scale"}, False, "has nothing for scale"
    yield {**weights, "more": torch.ones(1)}, True, "has more, too"
    yield {**weights, "scale": torch.ones(3)}, False, r"scale has the shape \(3,\), and \(16,\)"


@pytest.mark.parametrize(("weights", "strict", "message"), list(others()))
def test_another_checkpoint_is_refused(
    weights: dict[str, Tensor], strict: bool, message: str, tmp_path: Path
) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match=message):
        ours.load_checkpoint_and_dispatch(empty(), tmp_path, {"": "cpu"}, strict=strict)


def test_models_take_turns_on_a_device() -> None:
    first, hook = ours.cpu_offload_with_hook(nn.Linear(4, 4), CPU)
    second, last = ours.cpu_offload_with_hook(nn.Linear(4, 4), CPU, prev_module_hook=hook)
    assert second(first(torch.ones(1, 4))).shape == (1, 4)
    last.offload()


def test_other_names_are_those_of_accelerate() -> None:
    from qoff.accelerate import Accelerator

    assert Accelerator is accelerate.Accelerator
    with pytest.raises(AttributeError, match=r"module 'qoff.accelerate' has no attribute 'nothing"):
        _ = ours.nothing
