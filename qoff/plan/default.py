"""What runs where nobody gave a plan or a budget: everything on the device, or what fits there."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from qoff.checkpoint import Checkpoint
from qoff.kvcache.quant import UnpackableError
from qoff.kvcache.store.placement import DEVICE, HOST
from qoff.models.modules.configs import is_native
from qoff.units import format_size

from .machine import assumed_profile, kept_profile, usable_memory
from .manual import Memory, Plan
from .sizes import ModelSizes
from .workload import Lengths, Workload

logger = logging.getLogger(__name__)
_BESIDE = 256 << 20  # bytes beside the weights that one sequence takes, at least
_SHARE = 0.1  # of the weights, where that is more


def default_plan(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, share: float = 1.0
) -> Plan:
    """`Plan()` where it fits the memory that is free; else the planner's, and a line says why.

    share: of what is free but on a GPU, where other processes have the rest. The planner assumes
    prompts and answers that fill `Plan().context`. Raises BudgetError, in a line, where nothing
    fits.
    """
    plain = Plan()
    if not is_native(checkpoint.config):
        return plain  # of transformers' modules nothing is known without them
    sizes, spill = ModelSizes.of_checkpoint(checkpoint), _spill_folder()
    free = usable_memory(device, spill)
    own = {DEVICE} if device.type == "cuda" else set()
    usable = {tier: free[tier] if tier in own else int(free[tier] * share) for tier in free}
    try:
        if device.type == "cuda":
            from .gpu import memory_on_gpu  # needs Triton

            recorded = plain.batch_size
            memory = memory_on_gpu(
                plain, sizes.spec, sizes.shapes, device, dtype, recorded=recorded
            )
        else:
            memory = Memory.of(plain, sizes.spec, sizes.shapes)
    except UnpackableError:
        return plain  # which is refused later
    wanted = sizes.nbytes + memory.total(DEVICE)
    if wanted <= usable[DEVICE]:
        return plain
    from .explain import explain

    folder = spill or checkpoint.path
    machine = kept_profile(device, checkpoint.path, folder) or assumed_profile(device, folder)
    machine = replace(machine, usable=usable)
    limit = min(plain.context, sizes.spec.position_limit or plain.context)
    answer = max(1, limit // 8)
    work = Workload(Lengths.of(limit - answer), Lengths.of(answer))
    found = explain(sizes, machine, work, plain)
    notes = "".join(f"; {note}" for note in machine.notes)
    logger.warning(
        "%s: %s wanted, %s free on the device: %s%s",
        checkpoint.path,
        format_size(wanted),
        format_size(usable[DEVICE]),
        found.line(),
        notes,
    )
    return found.found.plan


def default_bounds(checkpoint: Checkpoint, device: torch.device) -> tuple[int | None, int | None]:
    """Bounds of device and host memory for `qoff.load`: None where the weights fit what is free.

    Otherwise what is free, a reserve left, with a line that says why.
    """
    usable = usable_memory(device, None)
    weights = sum(file.nbytes for file in checkpoint.files)
    wanted = weights + max(_BESIDE, int(weights * _SHARE))
    if wanted <= usable[DEVICE]:
        return None, None
    logger.warning(
        "%s: %s wanted, %s free on the device: it is bound to that, and the rest streams",
        checkpoint.path,
        format_size(wanted),
        format_size(usable[DEVICE]),
    )
    return usable[DEVICE], usable[HOST] or None


def _spill_folder() -> Path | None:
    """That for temporary files; None where there is none that can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return None
