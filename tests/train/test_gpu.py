"""Training on a GPU, simulated: losses and weights are those of the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from qoff import train
from qoff.budgets import CPU
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, BudgetError, DiskReadError, TrainingError
from qoff.plan.profile import Link
from qoff.train.forecast import forecast
from qoff.train.gpu_link import GpuLink
from qoff.train.homes import Home, Homes
from qoff.train.placement import placed
from qoff.train.swaps import Swaps
from tests.plan.machines import machine
from tests.tiny_models import tiny_checkpoint

from .gpu import LateStream, on_meta, simulated
from .test_planned import job_of
from .test_training import LAYERS, LR, OPTIMIZERS, TOKENS, batch, model_of

MANY = 5  # layers, of which three are in slots
PLACES = ["host", "host and disk", "disk"]
Found = tuple[list[float], dict[str, Tensor], train.Training]


def run(model: Any, place: str, folder: Path, count: int = 2, **options: Any) -> Found:
    given = {"tokens": TOKENS, "micro_batches": count, "disk": folder, **options}
    if place != PLACES[0]:
        with pytest.raises(BudgetError, match="host memory: 0 bytes are too few") as refused:
            train.offload(model, **given, host_memory=0)
        least = int(str(refused.value).rpartition(" ")[2].replace(",", ""))
        layer = sum(p.nbytes for p in model.model.layers[0].parameters())
        given["host_memory"] = least + 5 * layer // 2 * (place == PLACES[1])
    training = train.offload(model, **given)
    losses = [training.step([batch(9 * i + step) for i in range(count)]) for step in range(3)]
    return losses, training.state_dict(), training


def assert_same(found: Found, wanted: Found) -> None:
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert [name for name, x in wanted[1].items() if not torch.equal(found[1][name], x)] == []
    stats = found[2].stats
    assert (stats.device_peak, stats.host_peak) == found[2].placement.totals[:2]


@pytest.mark.parametrize(
    ("name", "place"),
    [*((name, "disk") for name in OPTIMIZERS), ("adamw", "host"), ("adamw", "host and disk")],
)
def test_full_training_is_that_of_the_cpu(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if name == "adamw" else torch.float32
    made = partial(model_of, "llama", dtype, num_hidden_layers=MANY)
    wanted = run(made(), PLACES[0], tmp_path, optimizer=OPTIMIZERS[name]())
    simulated(monkeypatch)
    found = run(made(), place, tmp_path, optimizer=OPTIMIZERS[name]())
    assert_same(found, wanted)
    weights = found[2].placement.weights
    assert len(weights) == {"host": MANY, "host and disk": 2, "disk": 0}[place]


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "clipped": (partial(model_of, "tied"), {"max_norm": 0.1}),
    "delayed": (partial(model_of, "tied", torch.bfloat16), {"delayed": True}),
    "clipped, rounded": (partial(model_of, "llama", torch.bfloat16), {"max_norm": 0.1}),
    "float16": (partial(model_of, "llama", torch.float16), {}),
    "activations kept": (partial(model_of, "llama"), {"activation_memory": "1GiB"}),
    "dropout": (partial(model_of, "llama", attention_dropout=0.3), {}),
    "mixture": (partial(model_of, "mixtral"), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_so_are_its_kinds(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = KINDS[kind]

    def found(place: str) -> Found:
        model = make()
        torch.manual_seed(3)
        return run(model, place, tmp_path, optimizer=train.AdamW(lr=LR), **options)

    wanted = found("host")
    simulated(monkeypatch)
    for place in ("host", "disk"):
        assert_same(found(place), wanted)


def test_hidden_states_of_many_micro_batches_lie_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(model_of("llama"), PLACES[0], tmp_path, 8)
    simulated(monkeypatch)
    first = run(model_of("llama"), PLACES[0], tmp_path, 8)[2].placement
    for place in ("host", "disk"):
        less = sum(first.device.values()) - 1
        found = run(model_of("llama"), place, tmp_path, 8, device_memory=less)
        assert_same(found, wanted)
        assert (first.device["hidden states"], found[2].placement.device["hidden states"]) == (
            8 * 4096,
            0,
        )


def test_inputs_of_layers_take_what_a_gpu_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(model_of("llama"), PLACES[0], tmp_path)
    simulated(monkeypatch)
    whole = run(model_of("llama"), "host", tmp_path)
    least = sum(whole[2].placement.device.values())
    moved = "inputs of units to the GPU"
    every = whole[2].stats.moved[moved]
    for near in (0, 2, LAYERS):
        room = least + near * 2 * 4096 + 4096
        found = run(model_of("llama"), "host", tmp_path, device_memory=room)
        assert_same(found, wanted)
        assert found[2].placement.near == frozenset(range(LAYERS - near, LAYERS))
        assert found[2].stats.moved.get(moved, 0) == every * (LAYERS - near) // LAYERS


@pytest.mark.parametrize("count", [1, 3])
def test_units_are_copied_twice_a_step(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated(monkeypatch)
    training = run(model_of("llama", num_hidden_layers=MANY), "host", tmp_path, count)[2]
    moved, unit = training.stats.moved, training.placement.host["weights"] // MANY
    assert moved["weights to the GPU"] == 3 * (2 * MANY - 1) * unit
    assert moved["gradients from the GPU"] == 3 * MANY * unit  # both are float32
    assert moved["inputs of units to the GPU"] == moved["inputs of units from the GPU"]
    assert moved["inputs of units to the GPU"] == 3 * count * MANY * 4096


@pytest.mark.parametrize(("clips", "dtype"), [(False, "bfloat16"), (True, "float32")])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_plan_counts_what_lies_and_moves(
    place: str, clips: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("llama", train.AdamW(lr=LR), clips=clips, dtype=dtype)
    simulated(monkeypatch)
    least = placed(job.sizes, None, 0, True, apart=True).totals[1] if place == "disk" else None
    training = train.offload(
        model_of("llama", getattr(torch, dtype)),
        train.AdamW(lr=LR),
        tokens=TOKENS,
        micro_batches=2,
        host_memory=least,
        disk=tmp_path,
        max_norm=1.0 if clips else None,
    )
    assert placed(job.sizes, None, least, True, apart=True) == training.placement
    training.step([batch(0), batch(1)])
    one = Link(1.0)  # a byte a second: seconds are bytes
    links: dict[str, Any] = {
        "disk_read": one,
        "disk_write": one,
        "to_device": one,
        "from_device": one,
    }
    found = forecast(job, replace(machine(True), **links), training.placement).by_resource
    ways = {"read": "disk read", "written": "disk write"}
    ways |= {"to the GPU": "to device", "from the GPU": "from device"}
    moved = training.stats.moved
    for way, link in ways.items():
        assert found.get(link, 0) == sum(n for what, n in moved.items() if what.endswith(way)), way


def test_activations_on_disk_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = partial(model_of, "llama", attention_dropout=0.3)
    measured = Swaps._measured
    monkeypatch.setattr(Swaps, "_measured", lambda self: 1e12 * (measured(self) > 0))
    torch.manual_seed(3)
    wanted = run(made(), "host", tmp_path, activation_memory="1GiB")
    each = wanted[2].stats.activations_planned // (2 * 3)  # layers and micro-batches
    simulated(monkeypatch)
    bounds: dict[str, Any] = {"activation_memory": 3 * each + 2 * 4096, "activation_disk": "1MiB"}
    torch.manual_seed(3)
    found = run(made(), "host", tmp_path, **bounds)
    assert_same(found, wanted)
    stats = found[2].stats
    assert stats.activations_peak == stats.activations_planned <= 3 * each + 2 * 4096
    moved = stats.moved
    assert moved["activations to the GPU"] == moved["activations read"] > 0
    assert moved["activations from the GPU"] == moved["activations written"]
    assert moved["activations written"] >= 2 * 3 * each  # of the second step and the third
    job = job_of("llama", train.AdamW())
    sizes = replace(job.sizes, swaps=True)
    assert placed(sizes, None, None, True, apart=True) == found[2].placement
    assert placed(job.sizes, None, None, True, apart=True) != found[2].placement


def test_a_copy_that_is_not_waited_for_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated(monkeypatch)
    training = train.offload(model_of("llama"), tokens=TOKENS)
    monkeypatch.setattr(LateStream, "order_after", lambda *_: None)
    with pytest.raises(TrainingError, match="the loss is nan"):
        training.step([batch(0)])


def test_a_run_goes_on_wherever_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"optimizer": train.AdamW(lr=LR), "tokens": TOKENS, "disk": tmp_path}
    made = partial(model_of, "llama", attention_dropout=0.3)

    def losses(training: train.Training, first: int) -> list[float]:
        return [training.step([batch(first + i)]) for i in range(2)]

    on_cpu = train.offload(made(), **options)
    torch.manual_seed(5)
    losses(on_cpu, 0)
    on_cpu.save(tmp_path / "saved", 2)
    wanted, weights = losses(on_cpu, 2), on_cpu.state_dict()
    loss = on_cpu.evaluate([batch(7), batch(8)])
    simulated(monkeypatch)
    on_gpu = train.offload(made(), **options)
    losses(on_gpu, 30)  # others, which are forgotten
    assert on_gpu.resume(tmp_path / "saved") == 2
    assert losses(on_gpu, 2) == wanted
    assert all(torch.equal(x, weights[name]) for name, x in on_gpu.state_dict().items())
    assert on_gpu.evaluate([batch(7), batch(8)]) == loss
    on_gpu.save_model(tmp_path / "tuned")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    with torch.no_grad():
        ids = batch(0)["input_ids"]
        assert torch.equal(on_gpu.model.eval()(ids).logits, tuned(ids).logits)


@pytest.mark.parametrize("places", [{}, {"device_map": "disk"}], ids=["resident", "streamed"])
def test_adapters_learn_as_on_the_cpu(
    places: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from .test_lora import lora

    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    options: dict[str, Any] = {
        "optimizer": train.AdamW(lr=LR),
        "tokens": TOKENS,
        "micro_batches": 3,
    }

    def found() -> tuple[list[float], dict[str, Tensor], train.Training]:
        model = lora(AutoModelForCausalLM.from_pretrained(path, **places))
        training = train.offload(model, **options)
        losses = [training.step([batch(step), batch(step + 9)]) for step in range(3)]
        return losses, training.state_dict(), training

    wanted = found()
    simulated(monkeypatch)
    ours = found()
    assert_same(ours, wanted)
    if places:
        layers = sum(file.nbytes for file in Checkpoint.open(path).layers)
        assert 0 < ours[2].stats.frozen_read <= 2 * 3 * layers + 2 * layers


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"activation_memory": "1GiB"}])
def test_nothing_is_computed_of_two_devices(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's memory is on the meta device."""
    with on_meta(monkeypatch):
        with torch.device("meta"):
            model = model_of("llama", torch.bfloat16, attention_dropout=0.3)
        training = train.offload(model, tokens=TOKENS, micro_batches=2, **options)
        for _ in range(2):
            assert training.step([batch(0), batch(1)]) == 2.0  # each micro-batch's is 1
        assert training.evaluate([batch(2)]) == 1.0
        with pytest.raises(RuntimeError, match="two devices"):  # or this would be no test
            _ = training.model.lm_head.weight @ torch.ones(64, 1, dtype=torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_of_a_read_that_fails_nothing_comes_later() -> None:
    """Its first piece is on its way when the second one cannot be read."""

    class Damaged(Homes):
        def read(self, home: Home, into: Tensor) -> Future[None]:
            ended: Future[None] = Future()
            if home.offset:
                ended.set_exception(DiskReadError("no"))
            else:
                into.fill_(1)
                ended.set_result(None)
            return ended

    homes, up, down = Damaged(0, 0, 0, None), LateStream(CPU), LateStream(CPU)
    link = GpuLink(homes, up, down, list(torch.zeros(4, 1024, dtype=torch.uint8)))
    into = torch.zeros(2048, dtype=torch.uint8)
    read = link.read(Home("weights", len(into), None), into)
    assert isinstance(read.exception(), DiskReadError)
    into.fill_(7)  # it is given back
    up.copy(into[:0], into[:0], None, timed=False).ended.synchronize()
    assert into.unique().tolist() == [7]
    link.close()
    up.close()
    homes.close()


def test_what_a_gpu_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = model_of("llama"), dict[str, Any](tokens=TOKENS, disk=tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(
            ArgumentError, match="no GPU that torch can use; train with device 'cpu'"
        ):
            train.offload(model, **given, device="cuda")
    with pytest.raises(ArgumentError, match="'cpu' or 'cuda', not on 'meta'"):
        train.offload(model, **given, device="meta")
    simulated(monkeypatch)
    with pytest.raises(BudgetError, match="device memory: 1,000 bytes are too few"):
        train.offload(model, **given, device_memory=1000)
