"""Devices, dtypes and memory bounds, as all doors understand them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qoff import budgets
from qoff.budgets import (
    check_host_bound,
    device_guard,
    memory_bounds,
    resolve_device,
    resolve_dtype,
)
from qoff.errors import ArgumentError, OpError
from qoff.kernels.ops import ops_for
from qoff.log import say_once
from qoff.plan import Plan

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("given", "device", "bounds"),
    [
        ((None, None, None), GPU, (None, None)),
        (("4GiB", 17, None), GPU, (4 << 30, 17)),
        ((None, None, {0: "12GiB", "cpu": "32GiB"}), GPU, (12 << 30, 32 << 30)),
        ((None, None, {1: 5}), torch.device("cuda:1"), (5, None)),
        ((5, None, {0: 5, "cpu": 6}), GPU, (5, 6)),
        ((None, None, {"cpu": "1KB"}), CPU, (1000, None)),
    ],
)
def test_bounds_are_bytes(given: Any, device: torch.device, bounds: Any) -> None:
    assert memory_bounds(*given, device) == bounds


@pytest.mark.parametrize(
    ("given", "device", "message"),
    [
        ((True, None, None), GPU, "device_memory is True"),
        ((1.5, None, None), GPU, "device_memory is 1.5"),
        ((None, "much", None), GPU, "host_memory: 'much' is not a size"),
        ((4, None, {0: 5}), GPU, "device_memory is 4 bytes and max_memory"),
        ((None, 4, {"cpu": 5}), CPU, "host_memory is 4 bytes and max_memory"),
        ((None, None, {0: 5}), CPU, "max_memory names 0, but the model runs on 'cpu'"),
        ((None, None, {1: 5}), GPU, "max_memory names 1"),
        ((None, None, "4GiB"), GPU, "max_memory is '4GiB'"),
    ],
)
def test_contradictions_are_refused(given: Any, device: torch.device, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        memory_bounds(*given, device)


def test_a_bound_that_would_bind_nothing_is_refused() -> None:
    """On a GPU, host memory may be bounded alone."""
    with pytest.raises(ArgumentError, match="device_memory alone bounds everything"):
        check_host_bound(None, 5, CPU)
    for bounds in ((None, None, CPU), (4, 5, CPU), (4, None, CPU), (None, 5, GPU)):
        check_host_bound(*bounds)


def test_a_plan_holds_bytes() -> None:
    plan = Plan(device_memory="4GiB")
    assert (plan.device_memory, plan.host_memory) == (4 << 30, None)
    assert plan == Plan(device_memory=4 << 30) != Plan()


def gpu_of(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    """Have torch describe a GPU of a compute capability."""
    found = SimpleNamespace(name="GTX", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)


def test_auto_is_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_of(monkeypatch, 7, 5)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for there, name in ((True, "cuda:1"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert resolve_device("auto") == torch.device(name)
    with pytest.raises(ArgumentError, match="no device is called 'tpu:0'"):
        resolve_device("tpu:0")
    with pytest.raises(ArgumentError, match="'cpu' or 'cuda', not on 'mps'"):
        resolve_device("mps")


def test_auto_is_the_cpu_beside_a_gpu_that_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu_of(monkeypatch, 6, 1)
    say_once.cache_clear()
    assert resolve_device("auto") == resolve_device("auto") == CPU
    assert "'auto' is the CPU: GTX has compute capability 6.1, and qoff's kernels" in caplog.text
    with pytest.raises(OpError, match=r"need 7\.5; use device='cpu'"):
        ops_for(resolve_device("cuda"))
    gpu_of(monkeypatch, 9, 0)
    assert resolve_device("auto") == torch.device("cuda:0")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert resolve_device("auto") == CPU
    assert len(caplog.records) == 2
    assert "ROCm" in caplog.text


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RuntimeError("Failed to find C compiler."), "install gcc, or name another with CC, or"),
        (CalledProcessError(1, ["gcc"]), "Python's headers"),
        (PermissionError(13, "Permission denied", "/root/.triton"), "TRITON_CACHE_DIR"),
        (
            RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"),
            "has the GPU",
        ),
        (AssertionError(), r"on cuda: AssertionError\(\); or use device='cpu'"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), None),
    ],
)
def test_a_gpu_on_which_no_kernel_starts_says_what_to_do(
    error: Exception, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from qoff.kernels.triton.elementwise import rms_norm

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1, 128))
    monkeypatch.setattr(rms_norm, "rms_norm", fails)
    gpu_of(monkeypatch, 9, 0)
    for _ in range(2):  # what failed is tried again
        if advice is None:  # who opens a model says it
            with pytest.raises(RuntimeError, match="out of memory"):
                ops_for(GPU)
        else:
            with pytest.raises(OpError, match=advice):
                ops_for(GPU)


@pytest.mark.parametrize(
    ("dtype", "config", "device", "found"),
    [
        ("auto", {"torch_dtype": "bfloat16"}, CPU, torch.float32),
        ("float32", {}, CPU, torch.float32),
        ("auto", {"dtype": "bfloat16"}, GPU, torch.bfloat16),
        ("auto", {"torch_dtype": "float16"}, GPU, torch.float16),
        ("auto", {"text_config": {"dtype": "float16"}}, GPU, torch.float16),
        ("auto", {"dtype": "float32"}, GPU, torch.bfloat16),
        ("auto", {}, GPU, torch.bfloat16),
        (torch.float16, {"dtype": "bfloat16"}, GPU, torch.float16),
        (torch.float16, {}, CPU, "a CPU computes in float32"),
        ("float32", {}, GPU, "float16 or bfloat16, not 'float32'"),
        ("float12", {}, GPU, "dtype is 'float12'"),
    ],
)
def test_a_dtype_is_what_the_device_computes_in(
    dtype: Any, config: Any, device: torch.device, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    if isinstance(found, torch.dtype):
        assert resolve_dtype(dtype, config, device) == found
    else:
        with pytest.raises(ArgumentError, match=found):
            resolve_dtype(dtype, config, device)


def test_a_gpu_without_bfloat16_computes_in_float16(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    say_once.cache_clear()
    assert resolve_dtype("auto", {"dtype": "float32"}, GPU) == torch.float16
    assert not caplog.records
    for _ in range(2):
        assert resolve_dtype("auto", {"dtype": "bfloat16"}, GPU) == torch.float16
    assert [one.message[:25] for one in caplog.records] == ["dtype 'auto' is float16: "]
    with pytest.raises(ArgumentError, match="cannot multiply bfloat16"):
        resolve_dtype("bfloat16", {"dtype": "bfloat16"}, GPU)


def test_the_gpu_that_was_chosen_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = [0]

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        before, current[0] = current[0], chosen.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: current[0] == 1)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ArgumentError, match="there is no GPU 2; torch sees 2"):
        resolve_device("cuda:2")
    for index, dtype in enumerate((torch.float16, torch.bfloat16)):
        assert resolve_dtype("auto", {}, torch.device("cuda", index)) == dtype
    with device_guard(CPU):
        assert current == [0]


def test_memory_is_given_back_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[object]()

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        told.append(device)
        yield

    monkeypatch.setattr("torch.cuda.device", current)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: told.append("empty_cache"))
    budgets.give_back(CPU)
    assert told == []
    budgets.give_back(torch.device("cuda", 1))
    assert told == [torch.device("cuda", 1), "empty_cache"]
