"""What all tests share: seeds, hypothesis profiles, no network, poisoned fresh memory."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

# For `bench` and `tests`; last, or the folder `kernels` would stand for the PyPI package.
sys.path.append(str(Path(__file__).resolve().parents[1]))
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test may ask the hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Read when torch loads its OpenMP: threads that spin for work take the cores from another worker's.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Read when numpy loads its OpenBLAS, which the interpreter multiplies tiny blocks by: one thread is
# faster than two that wait for each other and take the cores from another worker's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from _typeshed import HasFileno

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run as numpy

if os.environ.get("QOFF_LATE_GPU"):
    from tests.late_gpu import install

    install(early_copies=os.environ["QOFF_LATE_GPU"] == "early")

if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("dev", deadline=None, max_examples=30)
    settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True, database=None)
    settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A machine with a GPU may have little more than torch and transformers: tests of what needs one of
# these are skipped there. They are dependencies of qoff or its tests: elsewhere they are found.
_MAY_BE_MISSING = frozenset(
    {
        "accelerate",
        "datasets",
        "fastapi",
        "gguf",
        "greenlet",
        "hypothesis",
        "llguidance",
        "lm_eval",
        "matplotlib",
        "openai",
        "peft",
        "ray",
        "prometheus_client",
        "psutil",
        "pydantic",
        "rich",
        "scipy",
        "starlette",
        "typer",
        "uvicorn",
    }
)


_FREEZE_S = 10.0
_frozen = 0.0


class OptionalModule(pytest.Module):
    """A file of tests, skipped with a reason where a package that it imports is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            cause = error.__cause__
            missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
            name = (missing or "").partition(".")[0]
            if name not in _MAY_BE_MISSING or find_spec(name) is not None:
                raise
            # Others that import it would find it half imported.
            for module in [m for m, of in sys.modules.items() if _file(of) == str(self.path)]:
                del sys.modules[module]
            pytest.skip(f"needs the package {name}", allow_module_level=True)


def _file(module: object) -> str | None:
    return getattr(module, "__file__", None)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return OptionalModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU that torch can use")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_configure() -> None:
    gc.disable()  # until all is imported; see below


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what was imported: 700,000 objects, 0.9 s a look.

    And have torch's 50 loggers propagate: pytest would attach six handlers to each in every test,
    which takes 1 ms. Behind the root logger's they hear the same.
    """
    gc.freeze()
    gc.enable()
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch":
            logger.propagate = True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Have it leave alone what a file has imported or remembered, too, once in a while.

    Engines look for garbage when they are closed: 0.1 s, if all that is there takes part.
    """
    global _frozen
    if (nextitem is None or nextitem.path != item.path) and monotonic() - _frozen > _FREEZE_S:
        gc.collect()
        gc.freeze()
        _frozen = monotonic()


def pytest_unconfigure() -> None:
    """Have the interpreter free it at its end: nanobind prints what Triton still has by then."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def streams_wait_for_each_other() -> Iterator[None]:
    """On the late GPU, no memory is freed or used while another stream may still use it."""
    yield
    if os.environ.get("QOFF_LATE_GPU"):
        from tests.late_gpu import DEVICE

        found, DEVICE.faults = DEVICE.faults, []
        assert not found


@pytest.fixture(scope="session", autouse=True)
def interpreted_calls_are_cheap() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        from tests.interpreter import make_fast

        make_fast()


@pytest.fixture(scope="session", autouse=True)
def interpreted_kernels_stay_within_their_operands() -> None:
    """Fail a test whose kernels read or write anything else."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        from tests.bounds import check_interpreter

        check_interpreter()


@pytest.fixture(scope="session", autouse=True)
def auto_is_the_cpu() -> Iterator[None]:
    """Have tests that name no device run on the CPU, where there is a GPU, too."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            for module in ("qoff.budgets", "qoff.hf.device", "qoff.hf.load"):
                patch.setattr(f"{module}.resolve_device", cpu_for_auto, raising=False)
        yield


def cpu_for_auto(device: torch.device | str) -> torch.device:
    return torch.device("cpu" if device == "auto" else device)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests of a process keep the models that they share."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session")
def checkpoint(base: Path) -> Path:
    """A model whose heads can be packed; folders and files may have another one."""
    from tests.tiny_models import tiny_checkpoint  # imports transformers, which many do without

    return tiny_checkpoint(base, "llama-head64")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what qoff remembers in a temporary folder, of the processes that tests start, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QOFF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_test_waits_for_the_disk() -> Iterator[None]:
    """Have `os.fsync` look whether its file is open, and no more.

    It waits for a disk for 1 to 10 ms, a dozen times for each small model that is converted, and
    all that it changes is what is left when the machine loses its power. Tests of when it is called
    put one of their own in its place.
    """

    def fsync(file: int | HasFileno) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random numbers."""
    random.seed(0)
    np.random.seed(0)
    # Without a GPU `torch.manual_seed` notes for each kind the stack of who would seed it: 4 ms.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its kin return with NaN (integers: the largest value).

    torch offers this only together with its deterministic algorithms; of these the tests need no
    more than a warning where there is none. A test that reads memory nobody wrote then fails always
    instead of sometimes.
    """
    before = (
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    # `use_deterministic_algorithms` would import torch's compiler, 1.2 s in each process.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
