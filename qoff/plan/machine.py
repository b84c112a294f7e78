"""The machine at hand: memory that can be used, and the profile that was measured of it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from qoff.errors import FormatError
from qoff.kernels.ops import ops_for
from qoff.kernels.processor import usable_threads
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.settings import cache_directory
from qoff.system_memory import free_memory, left_by_limits

from .processor import Processor
from .profile import Link, MachineProfile

logger = logging.getLogger(__name__)
# Bytes that are left free: so many, but no more than an eighth, and no less than a twentieth.
LIMITED = 24 << 20  # of main memory first, under a cgroup's limit: what serving takes beside plans
RESERVE = {DEVICE: 512 << 20, HOST: 1 << 30, DISK: 2 << 30}


def usable_memory(device: torch.device, folder: Path | None) -> dict[str, int]:
    """Bytes by tier that can be taken now, with a reserve left; folder: of the spill file.

    Main memory: what is available, or what a cgroup's limit leaves; on a CPU all of it is the
    device's. A folder in memory is no disk. RLIMIT_MEMLOCK bounds nothing: what cannot be
    registered is pinned by the driver. Raises OpError for a GPU that is not there.
    """
    free = free_memory()
    main = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free is None else free
    usable = with_reserve(HOST, main)
    if left_by_limits() is not None:
        main = max(0, main - LIMITED)
        usable = max(0, min(with_reserve(HOST, main), main - beside_plan(main)))
    found = {HOST: usable, DISK: with_reserve(DISK, _disk_free(folder))}
    if device.type != "cuda":
        return {DEVICE: found[HOST], HOST: 0, DISK: found[DISK]}
    ops_for(device)  # raises
    gpu, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return {DEVICE: with_reserve(DEVICE, gpu + kept), **found}


def with_reserve(tier: str, free: int) -> int:
    """What may be taken of so many free bytes of a tier."""
    return free - max(min(RESERVE[tier], free // 8), free // 20)


def beside_plan(nbytes: int) -> int:
    """Bytes of main memory that a process takes beside so many of a plan, at most.

    Page tables; threads and their stacks, what is read ahead of whole pages, and Python's objects.
    """
    return nbytes // 512 + (4 << 20)


def _disk_free(folder: Path | None) -> int:
    """Free bytes of a folder's file system, one that need not exist yet; 0 for one in memory."""
    if folder is None:
        return 0
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return 0 if _in_memory(there) else shutil.disk_usage(there).free


def _in_memory(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether a folder's files are in main memory."""
    kinds = dict(line.split(" ")[1:3] for line in mounts.read_text().splitlines())
    above = (folder.resolve(), *folder.resolve().parents)
    return next((kinds[str(p)] for p in above if str(p) in kinds), "") in ("tmpfs", "ramfs")


def fingerprint(device: torch.device, checkpoint: Path, spill: Path) -> str:
    """16 hex digits that change with processor, cores, memory, GPU and the disks of two folders."""
    described = [
        2,  # of this list: a profile of another version is found, and said to be old
        platform.machine(),
        _cpu_name(),
        usable_threads(),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        *(_disk(folder) for folder in (checkpoint, spill)),
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def profile_file(found: str) -> Path:
    """Where the profile of a fingerprint is kept."""
    return cache_directory() / f"machine-{found}.json"


def kept_profile(device: torch.device, checkpoint: Path, spill: Path) -> MachineProfile | None:
    """What was measured of this machine, with the memory that is free now; None if nothing was.

    A file that is damaged, or is of another machine, counts as none, and a line is logged.
    """
    wanted = fingerprint(device, checkpoint, spill)
    path = profile_file(wanted)
    if not path.exists():
        return None
    try:
        found = MachineProfile.read(path)
    except FormatError as error:
        logger.warning("%s", error)
        return None
    if found.fingerprint != wanted:
        logger.warning("%s: is of another machine; measured again by qoff env --measure", path)
        return None
    return replace(found, usable=usable_memory(device, spill))


def known_profile(device: torch.device, checkpoint: Path, spill: Path) -> MachineProfile:
    """What was measured of this machine; without that, rates that most machines reach."""
    return kept_profile(device, checkpoint, spill) or assumed_profile(device, spill)


def assumed_profile(device: torch.device, spill: Path) -> MachineProfile:
    """Rates that most machines reach, for one that was never measured."""
    cores = usable_threads()
    host = Processor.of(bytes_per_s=12e9, flops_per_s=40e9 * cores, call_s=20e-6)
    gpu = Processor.of(bytes_per_s=300e9, flops_per_s=20e12, call_s=10e-6)
    on_gpu = device.type == "cuda"
    disk = Link(5e8, 1e-4, 4e-10, 1e-4)
    copies = Link(8e9, 1e-5) if on_gpu else Link(8e9, 1e-5, 1.25e-10, 1e-4)
    found = MachineProfile(
        name="not measured",
        on_gpu=on_gpu,
        cores=cores,
        device=gpu if on_gpu else host,
        host=host,
        disk_read=disk,
        disk_write=replace(disk, bytes_per_s=3e8),
        to_device=copies,
        from_device=copies,
        usable=usable_memory(device, spill),
        notes=("rates are assumed; qoff env --measure measures them",),
    )
    return found.with_link(copies.bytes_per_s, copies.bytes_per_s) if on_gpu else found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _disk(folder: Path) -> int:
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return there.stat().st_dev
