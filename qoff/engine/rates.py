"""What the rounds of an open plan take, by the rates of its machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from qoff.plan.adapt import RunningPlan
from qoff.plan.machine import known_profile
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.profile import MachineProfile

from .executor import Executor


def running_plan(executor: Executor, machine: MachineProfile | None = None) -> RunningPlan:
    """The plan that an executor has open, of a model with a spec.

    machine: by default what was measured of this one; without that, rates that most machines reach.
    """
    plan, checkpoint = executor.plan, executor.runtime.checkpoint
    if machine is None:
        folder = plan.spill_folder or Path(tempfile.gettempdir())
        machine = known_profile(executor.device, checkpoint.path, folder)
    residency, sizes = executor.runtime.residency, NativeSizes.of_checkpoint(checkpoint)
    return RunningPlan(sizes, plan, executor.memory, residency, machine, executor.dtype)
