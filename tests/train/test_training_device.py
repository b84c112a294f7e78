"""Training on a GPU: losses and weights are those of the CPU."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff import train

from .test_gpu import Found, run
from .test_training import LOSSES, LR, TOKENS, WEIGHTS, batch, model_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("QOFF_LATE_GPU" in os.environ, reason="the late GPU has no gradients"),
]

KINDS: dict[str, tuple[str, str, torch.dtype, dict[str, Any]]] = {
    "host": ("llama", "host", torch.float32, {}),
    "disk, inputs kept": ("llama", "disk", torch.float32, {"activation_memory": "1GiB"}),
    "clipped": ("tied", "host", torch.float32, {"max_norm": 0.1}),
    "delayed": ("tied", "host", torch.bfloat16, {"delayed": True}),
    "mixture": ("mixtral", "host", torch.float32, {}),
    "factored": ("llama", "host", torch.float32, {"optimizer": train.Adafactor()}),
    "scaled": ("llama", "host", torch.float16, {}),
}


def assert_near(found: Found, wanted: Found, dtype: torch.dtype) -> None:
    near = (LOSSES, WEIGHTS) if dtype == torch.float32 else (0.02, 0.02)
    assert found[0] == pytest.approx(wanted[0], abs=near[0])
    assert found[1].keys() == wanted[1].keys()
    far = {name: (found[1][name].float() - x.float()).abs().max() for name, x in wanted[1].items()}
    assert {name: x for name, x in far.items() if not x < near[1]} == {}
    stats = found[2].stats
    assert (stats.device_peak, stats.host_peak) == found[2].placement.totals[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_full_training_is_that_of_the_cpu(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, place, dtype, options = KINDS[kind]
    monkeypatch.setattr("qoff.train.gpu_link.STAGING", 8192)  # so that units go in pieces
    given = {"optimizer": train.AdamW(lr=LR), **options}
    wanted = run(model_of(name, dtype), "host", tmp_path, **given)
    found = run(model_of(name, dtype), place, tmp_path, **given, device="cuda")
    assert_near(found, wanted, dtype)


def test_a_run_of_the_cpu_goes_on_there(tmp_path: Path) -> None:
    offload = partial(train.offload, optimizer=train.AdamW(lr=LR), tokens=TOKENS, disk=tmp_path)

    def steps(training: train.Training, first: int) -> list[float]:
        return [training.step([batch(first + i)]) for i in range(2)]

    on_cpu, on_gpu = offload(model_of("llama")), offload(model_of("llama"), device="cuda")
    steps(on_cpu, 0)
    on_cpu.save(tmp_path / "saved", 2)
    steps(on_gpu, 30)  # others, which are forgotten
    assert on_gpu.resume(tmp_path / "saved") == 2
    wanted, loss = steps(on_cpu, 2), on_cpu.evaluate([batch(7), batch(8)])
    found = steps(on_gpu, 2), on_gpu.state_dict(), on_gpu
    assert_near(found, (wanted, on_cpu.state_dict(), on_cpu), torch.float32)
    assert on_gpu.evaluate([batch(7), batch(8)]) == pytest.approx(loss, abs=LOSSES)
