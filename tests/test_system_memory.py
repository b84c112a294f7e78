"""What the machine has, and every refusal of memory as one error."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import qoff
from qoff import system_memory
from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError, BudgetError, DiskReadError
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory.arena import Arena
from qoff.models.convert.convert import convert
from qoff.models.native.layer import Layer
from qoff.plan import Plan
from qoff.system_memory import (
    free_memory,
    keep_large_apart,
    left_by_limits,
    machine_memory,
    own_memory,
    refusals,
    return_freed,
)
from tests.tiny_models import QUANT, tiny_model

HUGE = 1 << 61


def fake_machine(tmp_path: Path, group: str, limits: dict[str, str]) -> int | None:
    """The memory of a machine with 1000 KiB of RAM, 24 of swap, a process's group, and limits."""
    for name, text in {"meminfo": "MemTotal: 1000 kB\nSwapTotal: 24 kB\n", **limits}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(group)
    return machine_memory(tmp_path, tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("", {}, 1024 << 10),
        ("0::/a/b\n", {"cgroup/a/b/memory.max": "max", "cgroup/a/memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"cgroup/a/b/memory.max": "4000", "cgroup/a/memory.max": "5000"}, 4000),
        ("0::/outside\n", {"cgroup/memory.max": "7000\n"}, 7000),  # in a container
        ("3:cpu:/x\n2:memory:/x\n", {"cgroup/memory/x/memory.limit_in_bytes": "6000"}, 6000),
        ("2:memory:/\n", {"cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, 1024 << 10),
    ],
)
def test_the_memory_of_a_machine(
    group: str, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert fake_machine(tmp_path, group, limits) == expected


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "total"),
    [
        ("2:memory:/x/y\n", "memory/x", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ("0::/x/y\n", "x", "memory.max", "memory.current", ""),
    ],
    ids=["v1", "v2"],
)
def test_what_limits_leave_of_memory(
    line: str, folder: str, limit: str, used: str, total: str, tmp_path: Path
) -> None:
    """The least of what a group and those around it leave; cached files are counted as free."""
    root = tmp_path / "cgroup"
    group = root / folder
    inner = f"cgroup/{folder}/y"
    stat = f"file 300\n{total}inactive_file 100\n{total}active_file 200\n"
    limits = {
        f"cgroup/{folder}/{limit}": "6000",
        f"cgroup/{folder}/{used}": "4000\n",
        f"cgroup/{folder}/memory.stat": stat,
        f"{inner}/{limit}": "5000",  # which leaves more
        f"{inner}/{used}": "1000\n",
        f"{inner}/memory.stat": "file 0\n",
    }
    fake_machine(tmp_path, line, limits)
    found = [call(tmp_path, root) for call in (left_by_limits, free_memory)]
    assert found == [2200, 2200]
    lines = (tmp_path / "meminfo").read_text().splitlines()
    kib = {"MemAvailable": 1, "SwapFree": 2}
    more = [f"{name}: {size} kB" for name, size in kib.items()]
    kept = [line for line in lines if line.partition(":")[0] not in kib]
    (tmp_path / "meminfo").write_text("\n".join(kept + more))
    free = [free_memory(tmp_path, root, swap=swap) for swap in (False, True)]
    assert free == [1024, 2200]
    for one, least in ((root / folder / "y", 2200), (group, None)):
        (one / limit).write_text(str(2 << 30))  # more than the machine has
        assert left_by_limits(tmp_path, root) == least


def test_pages_of_files_are_not_a_processs_own(tmp_path: Path) -> None:
    size = 8 << 20
    (tmp_path / "file").write_bytes(bytes(size))
    with (
        (tmp_path / "file").open("rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as pages,
    ):
        before = own_memory()
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert own_memory() - before < size // 2
        before = own_memory()
        own = torch.ones(size, dtype=torch.uint8)
        assert own_memory() - before > size // 2
        del own


@pytest.mark.skipif(system_memory._trim() is None, reason="needs the GNU C library")
def test_freed_memory_below_what_is_in_use_is_given_back() -> None:
    size, libc = 32 << 20, ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(32 << 10) for _ in range(size >> 15)]
    for piece in pieces:
        ctypes.memset(piece, 1, 32 << 10)
    for piece in pieces[:-1]:
        libc.free(piece)
    before = system_memory._held("host")
    return_freed()
    given = before - system_memory._held("host")
    libc.free(pieces[-1])
    assert given > size // 2


@pytest.mark.skipif(system_memory._trim() is None, reason="needs the GNU C library")
def test_large_memory_is_given_back_as_soon_as_it_is_freed() -> None:
    size, libc = 8 << 20, ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    keep_large_apart()
    libc.free(libc.malloc(size))  # from then on the heap would have it
    holes = [libc.malloc(size) for _ in range(16)]  # which earlier tests have left there
    piece, above = libc.malloc(size), libc.malloc(32 << 10)
    ctypes.memset(piece, 1, size)
    before = own_memory()
    libc.free(piece)
    given = before - own_memory()
    for one in (above, *holes):
        libc.free(one)
    assert given > size // 2


def test_this_machine_has_some() -> None:
    there = machine_memory()
    assert there is not None
    assert there > 256 << 20
    assert machine_memory(Path("/gone"), Path("/gone")) is None


class OutOfMemoryError(RuntimeError):
    """As torch has it for a GPU."""


def raising(error: BaseException) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "python": (lambda: bytearray(HUGE), "host", "memory"),
    "torch": (lambda: torch.empty(HUGE, dtype=torch.uint8), "host", f"{HUGE:,} bytes"),
    "torch, larger than sizes are": (lambda: torch.empty(HUGE, 16), "host", "memory"),
    "numpy": (lambda: np.empty(1 << 60, np.uint8), "host", f"{1 << 60:,} bytes"),
    "mmap": (lambda: mmap.mmap(-1, HUGE), "host", "memory"),
    "a GPU": (
        raising(OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")),
        "device",
        f"{20 << 20:,} bytes",
    ),
    "a driver": (raising(RuntimeError("CUDA error: out of memory")), "device", "memory"),
    "Triton": (raising(RuntimeError("Triton Error [CUDA]: out of memory")), "device", "memory"),
    "cuBLAS": (
        raising(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")),
        "device",
        "memory",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_allocation_names_tier_and_bytes(name: str) -> None:
    allocate, tier, wanted = REFUSED[name]
    with (
        pytest.raises(BudgetError, match=f"^{tier} memory: the system refused {wanted}"),
        refusals(),
    ):
        allocate()


def test_a_limit_of_address_space_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have a hundred times as much memory."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (10**9, -1))
    with pytest.raises(BudgetError, match=r"1,000,000,000 bytes .*ulimit -v.*Raise"), refusals():
        bytearray(HUGE)


@pytest.mark.parametrize(("mapped", "named"), [(True, 2), (False, 0)])
def test_an_arena_names_the_limit_of_address_space_that_it_is_in(
    mapped: bool, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a GPU is not."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (10**9, -1))
    with pytest.raises(BudgetError, match=r"^device memory: the system refused") as refused:
        Arena("device", HUGE, mapped=mapped)
    said = str(refused.value)
    assert (
        sum(text in said for text in ("of 1,000,000,000 bytes of address space", "raise")) == named
    )


@pytest.mark.parametrize(("text", "held"), [("GPU 1 has a total capacity of", 22), ("", 11)])
def test_a_gpu_that_has_no_room_need_not_be_the_current_one(
    text: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reserved: dict[int | None, int] = {None: 11, 1: 22}
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu=None: reserved[gpu])
    error = OutOfMemoryError(f"CUDA out of memory. Tried to allocate 20.00 MiB. {text}")
    with pytest.raises(BudgetError, match=f"the process has {held} bytes\\."), refusals():
        raise error


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), RuntimeError("x"), OSError(2, "x"), DiskReadError("x"), ArgumentError("x")],
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as seen, refusals():
        raise error
    assert seen.value is error


def test_every_door_turns_refusals_into_budget_errors(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(tmp_path_factory.getbasetemp(), "llama-head64")
    out = tmp_path_factory.mktemp("out") / "out"

    def refuse(*_: object, **__: object) -> None:
        torch.empty(HUGE, dtype=torch.uint8)

    model, _ = qoff.load(checkpoint)
    with LLM(checkpoint, Plan(context=40)) as llm:
        ids = torch.tensor([[5, 6]])
        with monkeypatch.context() as patched:
            patched.setattr(Layer, "_mlp", refuse)
            for call in (
                lambda: model(ids),
                lambda: model.generate(ids, max_new_tokens=2),
                lambda: llm.generate([[5, 6]]),
            ):
                with pytest.raises(BudgetError, match=f"host memory: the system refused {HUGE:,}"):
                    call()
        assert llm.generate([[5, 6]], SamplingParams(ignore_eos=True))[0].token_ids
    with monkeypatch.context() as patched:
        patched.setattr("qoff.memory.store.streamed_images", refuse)
        patched.setattr("qoff.models.convert.builder.Builder.build", refuse)
        for call in (
            lambda: qoff.load(checkpoint),
            lambda: LLM(checkpoint),
            lambda: convert(source, out, quant=QUANT),
        ):
            with pytest.raises(BudgetError, match="host memory: the system refused"):
                call()
    assert list(out.parent.iterdir()) == []


IMPOSSIBLE = [
    {"prefill_tokens": 10**9},
    {"batch_size": 10**15},
    {"batches": 10**7},
    {"context": 10**9},
    {"context": 10**9, "kv_placement": KVPlacement(0.2, 0.3)},
    {"batches": 10**6, "batch_size": 1000, "kv_placement": KVPlacement(0, 0)},
    {"prefill_tokens": 10**15, "activations": "disk"},
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("options", IMPOSSIBLE, ids=str)
def test_plans_beyond_the_machine_are_refused_at_once(
    options: dict[str, object], checkpoint: Path
) -> None:
    with pytest.raises(BudgetError, match=r"take .* are free; lower batch_size, batches, context"):
        LLM(checkpoint, Plan(**{"context": 300, **options}))  # type: ignore[arg-type]


def test_a_model_larger_than_the_machine_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_memory, "free_memory", lambda **_: 10_000)
    with pytest.raises(BudgetError, match=r"weights .* take .* bytes, and 10,000 are free; lower"):
        qoff.load(checkpoint)


def test_a_kv_cache_larger_than_the_free_memory_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much the machine has, and where a cgroup leaves so much."""
    free = 64 << 20
    monkeypatch.setattr(system_memory, "free_memory", lambda **_: free)
    monkeypatch.setattr("qoff.plan.machine.free_memory", lambda: free)
    LLM(checkpoint, Plan(batch_size=2, context=300, prefill_tokens=16)).close()
    with pytest.raises(BudgetError, match=r"take .* and 67,108,864 are free; lower batch_size"):
        LLM(checkpoint, Plan(batch_size=64, context=100_000, prefill_tokens=16))
    monkeypatch.setattr("qoff.plan.default._BESIDE", 1 << 20)
    qoff.load(checkpoint, context=300)[0].close()
    with pytest.raises(BudgetError, match=r"KV cache .* sequences \(batch_size, context\)"):
        qoff.load(checkpoint, context=1_000, batch_size=1_000)


def test_kv_bits_of_more_layers_than_models_have_are_refused() -> None:
    with pytest.raises(ArgumentError, match="written like"):
        qoff.KVQuant.of("4/0-1000000000:8")
