"""What runs where nobody gave a plan or a budget, and what a cgroup's limit leaves of both."""

from __future__ import annotations

import logging
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import QuantEntry
from qoff.kernels.layout.widening import read_bits
from qoff.kvcache.quant import UnpackableError
from qoff.kvcache.store.placement import DEVICE, HOST
from qoff.models.modules.configs import is_native
from qoff.system_memory import left_by_limits
from qoff.units import format_size

from .machine import (
    LIMITED,
    assumed_profile,
    beside_plan,
    kept_profile,
    usable_memory,
    with_reserve,
)
from .manual import Memory, Plan
from .model_sizes import known_sizes
from .native_sizes import NativeSizes
from .workload import Lengths, Workload

logger = logging.getLogger(__name__)
_BESIDE = 256 << 20  # bytes beside the weights that one sequence takes, at least
_SHARE = 0.1  # of the weights, where that is more
_SEARCHES = 3  # under a limit, of which the first takes 10 MiB for its libraries


def default_plan(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    share: float = 1.0,
    plain: Plan | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """`plain` where it fits the memory that is free; else the planner's, and a line says why.

    share: of what is free but on a GPU, where other processes have the rest. plain: without bounds;
    None: `Plan()`. The planner assumes prompts and answers that fill its context, and prompts that
    are read as a whole to have no more tokens than a pass. Raises BudgetError, in a line, where
    nothing fits.
    """
    plain = plain or Plan()
    spill = _spill_folder()
    usable = _usable(device, spill, share)
    if not is_native(checkpoint.config) and _about(checkpoint, device) <= usable[DEVICE]:
        return plain  # modules are built once more to be counted
    sizes = known_sizes(checkpoint, trust_remote_code)
    try:
        memory = sizes.memory_of(plain, device.type == "cuda", device, dtype)
    except UnpackableError:
        return plain  # which is refused later
    wanted = sizes.nbytes + _widened(checkpoint, device) + memory.total(DEVICE)
    if wanted <= usable[DEVICE]:
        return plain
    from .explain import explain

    folder = spill or checkpoint.path
    machine = kept_profile(device, checkpoint.path, folder) or assumed_profile(device, folder)
    limit = min(plain.context, sizes.position_limit or plain.context)
    prompt = limit - max(1, limit // 8)
    if sizes.whole_prompts:
        prompt = min(prompt, plain.prefill_tokens)
    work = Workload(Lengths.of(prompt), Lengths.of(limit - prompt))
    for _ in range(_SEARCHES):
        found = explain(sizes, replace(machine, usable=usable), work, plain)
        before, usable = usable, _usable(device, spill, share)
        # a GPU's process has its limit in host memory
        if left_by_limits() is None or all(usable[t] >= before[t] for t in (DEVICE, HOST)):
            break
    notes = "".join(f"; {note}" for note in machine.notes)
    logger.warning(
        "%s: %s wanted, %s free on the device: %s%s",
        checkpoint.path,
        format_size(wanted),
        format_size(before[DEVICE]),
        found.line(),
        notes,
    )
    return found.found.plan


def default_bounds(
    checkpoint: Checkpoint, device: torch.device, share: float = 1.0, cache: int = 0
) -> tuple[int | None, int | None]:
    """Bounds of device and host memory for `qoff.load`: None where the weights fit what is free.

    Otherwise what is free, a reserve left, with a line that says why. Under a cgroup's limit a
    CPU's memory has a bound in any case. share: see `default_plan`. cache: bytes of a KV cache that
    is to fit, too.
    """
    usable = _usable(device, None, share)
    wanted = _about(checkpoint, device) + cache
    if wanted <= usable[DEVICE]:
        return within_limit(device, None, None, share=share)
    logger.warning(
        "%s: %s wanted, %s free on the device: it is bound to that, and the rest streams",
        checkpoint.path,
        format_size(wanted),
        format_size(usable[DEVICE]),
    )
    return usable[DEVICE], usable[HOST] or None


def host_bound(
    device: torch.device, device_bytes: int | None, host_bytes: int | None, share: float = 1.0
) -> int | None:
    """A bound of host memory; where a GPU's memory alone has one, what is free beside it.

    None: no bound, and no weights there. share: see `default_plan`.
    """
    if device.type != "cuda" or device_bytes is None or host_bytes is not None:
        return host_bytes
    return _usable(device, None, share)[HOST] or None


def within_limit(
    device: torch.device,
    device_bytes: int | None,
    host_bytes: int | None,
    taken: int = 0,
    share: float = 1.0,
) -> tuple[int | None, int | None]:
    """These bounds of device and host memory, or what a cgroup's limit leaves where that is less.

    On a CPU both are main memory: the device comes first, and has a bound in any case. taken: bytes
    of main memory beside both. What a process takes beside plans is left, and where nothing was
    asked of a CPU's device, a reserve; a line says what is bound to less than was asked. share: of
    what is left, for a CPU's device of which nothing was asked; what was asked may take all of it.
    """
    left = left_by_limits()
    if left is None:
        return device_bytes, host_bytes
    reserved = device.type == "cpu" and device_bytes is None
    most = max(0, int(left * share if reserved else left) - LIMITED)
    there = (with_reserve(HOST, most) if reserved else most - beside_plan(most)) - taken
    wanted = {DEVICE: device_bytes, HOST: host_bytes}
    if device.type != "cpu":
        del wanted[DEVICE]
    elif device_bytes is None:
        wanted[DEVICE] = max(0, there - (host_bytes or 0))
    found = {DEVICE: device_bytes, HOST: host_bytes}
    for tier, nbytes in wanted.items():
        if nbytes is None:
            continue
        found[tier] = bound = max(0, min(nbytes, there))
        there -= bound
        if bound < nbytes:
            logger.warning(
                "%s_memory is %s, but the limit of this process's cgroup leaves %s: bound to that",
                tier,
                format_size(nbytes),
                format_size(bound),
            )
    return found[DEVICE], found[HOST]


def plan_within_limit(
    plan: Plan, checkpoint: Checkpoint, device: torch.device, share: float = 1.0
) -> Plan:
    """The plan with bounds as `host_bound` and `within_limit` have them."""
    taken = 0
    if device.type == "cpu" and plan.host_memory is None and is_native(checkpoint.config):
        sizes = NativeSizes.of_checkpoint(checkpoint)
        with suppress(UnpackableError):  # which is refused later
            taken = Memory.of(plan, sizes.spec, sizes.shapes).total(HOST)
    host = host_bound(device, plan.device_memory, plan.host_memory, share)
    device_bytes, host_bytes = within_limit(device, plan.device_memory, host, taken, share)
    return replace(plan, device_memory=device_bytes, host_memory=host_bytes)


def _about(checkpoint: Checkpoint, device: torch.device) -> int:
    """Bytes that weights take on a device, and what a sequence does beside them, about."""
    weights = sum(file.nbytes for file in checkpoint.files) + _widened(checkpoint, device)
    return weights + max(_BESIDE, int(weights * _SHARE))


def _widened(checkpoint: Checkpoint, device: torch.device) -> int:
    """Bytes that weights take on a device beyond those of their files."""
    if device.type == "cpu":
        return 0
    entries = (entry for file in checkpoint.files for entry in file.weights.values())
    matrices = (entry for entry in entries if isinstance(entry, QuantEntry))
    return sum(
        e.codes.nbytes * read_bits(e.bits, "split32") // e.bits - e.codes.nbytes for e in matrices
    )


def _usable(device: torch.device, spill: Path | None, share: float) -> dict[str, int]:
    """Bytes by tier that a process with this share of its machine may take."""
    free = usable_memory(device, spill)
    own = {DEVICE} if device.type == "cuda" else set()
    return {tier: free[tier] if tier in own else int(free[tier] * share) for tier in free}


def _spill_folder() -> Path | None:
    """That for temporary files; None where there is none that can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return None
