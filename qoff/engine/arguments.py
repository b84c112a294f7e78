"""The arguments of a `qoff.LLM`, checked before anything is opened, and what executes its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.models.adapters import adapter_config
from qoff.models.modules.decoder import is_modules
from qoff.plan import Plan
from qoff.plan.saved import read_plan
from qoff.schema import shown

from .executor import CpuExecutor, Executor


def given_plan(plan: object) -> Plan | None:
    """The plan that is given, read if it is a file's. Raises ArgumentError for what is none."""
    if isinstance(plan, str | PathLike):
        return read_plan(plan)
    if not isinstance(plan, Plan | None):
        raise ArgumentError(f"plan is {shown(plan)}; give a Plan, or a file with one")
    return plan


def bounded(plan: Plan, **bounds: int | None) -> Plan:
    """The plan with these bounds, too. Raises ArgumentError where it has others."""
    given: dict[str, Any] = {name: value for name, value in bounds.items() if value is not None}
    for name, value in given.items():
        said = getattr(plan, name)
        if said not in (None, value):
            raise ArgumentError(
                f"{name} is {value} bytes, but {said} in the plan; give it in one place"
            )
    return replace(plan, **given)


def check_adapters(given: object) -> None:
    """Raise ArgumentError for what is neither folders by name nor None.

    And what `adapter_config` does for a folder without an adapter.
    """
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(
        isinstance(x, str | PathLike) for x in given.values()
    ):
        raise ArgumentError(f"adapters are {shown(given)}; give a dict of folders by name")
    for folder in given.values():
        adapter_config(folder)


def executor_of(
    checkpoint: Checkpoint, on_gpu: bool, trust_remote_code: bool
) -> tuple[Callable[..., Executor], dict[str, Any]]:
    """What computes a model, and its options beside those of all."""
    if is_modules(checkpoint):
        options = {"trust_remote_code": trust_remote_code}
        if on_gpu:
            from .gpu_module_executor import modules_on_gpu

            return modules_on_gpu, options
        from .module_executor import ModuleExecutor  # needs transformers' modules

        return ModuleExecutor, options
    if on_gpu:
        from .gpu_executor import GpuExecutor  # needs Triton

        return GpuExecutor, {}
    return CpuExecutor, {}
