"""Measuring a `MachineProfile` within 20 seconds: its links, and what `processor` finds."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from qoff.kernels.processor import usable_threads
from qoff.plan.machine import fingerprint, profile_file, usable_memory
from qoff.plan.profile import MachineProfile, typical
from qoff.schema import replace_text

from . import processor
from .links import LEAST, copies, disk, file_reads
from .machine import machine

_TURNS = 3  # in each of which all is measured: others have busy seconds
_WITHIN_S = 17.0  # that they may take; a slow machine has fewer


def measured_profile(device: torch.device, checkpoint: Path, spill: Path) -> MachineProfile:
    """Measure this machine; the files that are read and written are in these two folders.

    All of it up to three times in turn, and the medians are taken. On a GPU, attention to packed K
    and V is taken to be limited by its memory. Raises QoffError where the disks have no room.
    """
    start, turns = time.perf_counter(), list[MachineProfile]()
    while len(turns) < _TURNS:
        turns.append(_measured(device, checkpoint, spill))
        if (time.perf_counter() - start) * (1 + 1 / len(turns)) > _WITHIN_S:
            break
    return typical(turns)


def _measured(device: torch.device, checkpoint: Path, spill: Path) -> MachineProfile:
    """One turn."""
    on_gpu = device.type == "cuda"
    cpu = processor.of_cpu()
    where = machine()
    files = [f for f in sorted(checkpoint.glob("*.safetensors")) if f.stat().st_size > 4 * LEAST]
    same = checkpoint.stat().st_dev == spill.stat().st_dev
    write, read = disk(spill, on_gpu, reads=same and not files)
    if files:
        read = file_reads(files, on_gpu)
    elif not same:
        _, read = disk(checkpoint, on_gpu, writes=False)
    to_device, from_device = copies(device)
    name = torch.cuda.get_device_name(device) if on_gpu else str(where["cpu"])
    return MachineProfile(
        name=name,
        on_gpu=on_gpu,
        cores=usable_threads(),
        device=processor.of_gpu(device) if on_gpu else cpu,
        host=cpu,
        disk_read=read,
        disk_write=write,
        to_device=to_device,
        from_device=from_device,
        usable=usable_memory(device, spill),
        fingerprint=fingerprint(device, checkpoint, spill),
    )


def keep(profile: MachineProfile) -> Path:
    """Write a profile to where `kept_profile` finds it; returns the file."""
    path = profile_file(profile.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, profile.text())
    return path
