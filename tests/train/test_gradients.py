"""Gradients that are kept in bfloat16: of several micro-batches, rounded once; half the bytes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff import train
from qoff.errors import ArgumentError

from .test_training import EPS, LAYERS, LR, PLACES, batch, batches_of, model_of, offloaded

# Of losses in bfloat16, over 50 steps: torch's logits are bfloat16, ours are summed in float32.
LOSSES = 0.01


def gradients_of(model: Any, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Of the mean loss, summed over micro-batches in float32; and the loss."""
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    total = torch.zeros(())
    for b, n in zip(batches, counts, strict=True):
        loss = model(**b, use_cache=False).loss * (n / sum(counts))
        loss.backward()
        total += loss.detach()
        for name, p in model.named_parameters():
            sums[name] += p.grad
            p.grad = None
    return {**sums, "": total}


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]])
@pytest.mark.parametrize("norm", [None, 1e9])
def test_sums_of_layers_are_rounded_once(place: str, norm: float | None, tmp_path: Path) -> None:
    model = model_of("llama")
    wanted = gradients_of(model_of("llama"), batches_of(0))
    options: dict[str, Any] = {"gradients": "bfloat16", "max_norm": norm}
    training = offloaded(model, place, tmp_path, optimizer=train.SGD(lr=1.0), **options)
    before = training.state_dict()
    training.step(batches_of(0))
    for name, x in training.state_dict().items():
        found, exact = before[name] - x, wanted[name]
        kept = exact.bfloat16().float() if "layers" in name else exact
        near = (found - kept).abs() < 2e-7
        assert near.float().mean() > 0.999, name  # a tie may be another's
        assert torch.equal(kept, exact) == ("layers" not in name)


def test_those_of_one_micro_batch_in_bfloat16_are_as_they_are(tmp_path: Path) -> None:
    found, sizes = [], []
    for gradients in ("auto", "float32"):
        model = model_of("llama", torch.bfloat16)
        training = offloaded(
            model, PLACES[2], tmp_path, micro_batches=1, gradients=gradients, max_norm=0.5
        )
        losses = [training.step([batch(step)]) for step in range(3)]
        found.append((losses, training.state_dict()))
        sizes.append(training.placement.device["gradients at work"])
    assert found[0][0] == found[1][0]
    assert all(torch.equal(x, found[1][1][name]) for name, x in found[0][1].items())
    assert 2 * sizes[0] == sizes[1]


def test_half_as_many_bytes_move(tmp_path: Path) -> None:
    moved = []
    for gradients in ("auto", "float32"):
        model = model_of("llama", torch.bfloat16)
        training = offloaded(model, PLACES[2], tmp_path, gradients=gradients, max_norm=1.0)
        training.step(batches_of(0))
        stats = training.stats
        assert stats.moved["gradients written"] == stats.moved["gradients read"]
        assert stats.moved["gradients written"] == training.placement.disk["gradients"]
        assert (stats.device_peak, stats.host_peak) == training.placement.totals[:2]
        moved.append(stats.moved)
    count = sum(p.numel() for p in model_of("llama").model.layers.parameters())
    assert moved[1]["gradients written"] == 2 * moved[0]["gradients written"]
    assert moved[0]["gradients written"] == pytest.approx(2 * count, abs=LAYERS * 4096)
    others = [{k: n for k, n in one.items() if "gradients" not in k} for one in moved]
    assert others[0] == others[1]


@cache
def losses_of_torch() -> list[float]:
    """Of 50 steps in bfloat16: torch's sums and weights in float32, rounded where ours are."""
    losses, reference = [], model_of("llama", torch.bfloat16)
    masters = {n: p.detach().float().requires_grad_() for n, p in reference.named_parameters()}
    theirs = torch.optim.AdamW(masters.values(), lr=LR, eps=EPS)
    for step in range(50):
        found = gradients_of(reference, batches_of(step))
        for name, master in masters.items():
            exact = found[name]
            master.grad = exact.bfloat16().float() if "layers" in name else exact
        theirs.step()
        for name, p in reference.named_parameters():
            p.data.copy_(masters[name])
        losses.append(float(found[""]))
    return losses


@pytest.mark.parametrize("bits", [32, 8])
def test_50_steps_in_bfloat16_are_those_of_torch(bits: int, tmp_path: Path) -> None:
    model, optimizer = model_of("llama", torch.bfloat16), train.AdamW(lr=LR, eps=EPS, bits=bits)
    training = offloaded(model, PLACES[2], tmp_path, optimizer=optimizer)
    found = [training.step(batches_of(step)) for step in range(50)]
    assert found == pytest.approx(losses_of_torch(), abs=LOSSES)


def test_gradients_are_of_a_run_where_a_checkpoint_has_them(tmp_path: Path) -> None:
    model = model_of("llama")
    with pytest.raises(ArgumentError, match="gradients are 'half'; use auto, float32, bfloat16"):
        train.offload(model, tokens=12, gradients="half")
    train.offload(model, tokens=12).save(tmp_path)
    narrow = train.offload(model_of("llama"), tokens=12, gradients="bfloat16")
    narrow.resume(tmp_path)
    narrow.step([batch(0)])


def test_runs_of_older_versions_go_on(tmp_path: Path) -> None:
    """Their headers do not say what gradients are, which were float32."""

    def late(gradients: str) -> train.Training:
        model = model_of("llama", torch.bfloat16)
        return train.offload(model, tokens=12, delayed=True, gradients=gradients)

    first, path = late("float32"), tmp_path / "run.json"
    first.step([batch(0)])
    first.save(tmp_path)
    header = json.loads(path.read_text())
    assert header["run"].pop("gradients") == "float32"
    path.write_text(json.dumps(header))
    late("float32").resume(tmp_path)
    with pytest.raises(ArgumentError, match="its gradients are float32, here bfloat16"):
        late("auto").resume(tmp_path)
