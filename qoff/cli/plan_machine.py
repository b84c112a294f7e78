"""The machine that `qoff plan` plans for, of its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Context, Option

from qoff.errors import ArgumentError, QoffError
from qoff.units import parse_size

from .command import named
from .plan_model import folder_of

if TYPE_CHECKING:
    from qoff.plan.profile import MachineProfile


_LINK = 12e9  # bytes/s to a GPU that is described, and back: PCIe 3.0 x16, or half of 4.0
_LEAST = 10**6  # a second: a smaller number without a unit lacks it


@dataclass(frozen=True)
class MachineOptions:
    """A machine: the one at hand, one from a file, or one of given sizes and rates."""

    machine: Path | None = Option(None, help="File of qoff env --measure --save.")
    gpu: str | None = Option(None, help="Plan for a GPU with this usable memory, like 24GiB.")
    gpu_rates: str = Option("1TB/s,100T", help="With --gpu: its memory bandwidth and flop/s.")
    host: str | None = Option(None, help="Usable host memory, like 64GiB.")
    disk: str | None = Option(
        None, help="Free disk, like 1TB; a checkpoint to be made takes part of it."
    )
    link: str | None = Option(None, help="Bandwidth from host to GPU, like 25GB/s.")
    disk_rate: str | None = Option(None, help="Read rate of the disk, like 3GB/s.")
    disk_write_rate: str | None = Option(None, help="Write rate of the disk.")
    device: str = Option("auto", help="Device of this machine: cpu, or a GPU such as cuda.")

    def check(self, context: Context) -> None:
        """Raise ArgumentError for options that others make void, or whose own they lack."""
        given = named(context, vars(self))
        if self.machine is not None and "device" in given:
            raise ArgumentError("--machine says what computes; leave out --device")
        if self.gpu is None and "gpu_rates" in given:
            raise ArgumentError("--gpu-rates are those of a GPU that --gpu describes; give both")

    def check_packing(self, model: str) -> None:
        """Raise ArgumentError for a checkpoint in the CPU's packing where a GPU here computes."""
        from qoff.budgets import resolve_device
        from qoff.hf.device import check_packing
        from qoff.schema import read_object

        there = folder_of(model)
        if there is not None and self.machine is None and self.gpu is None:
            check_packing(model, read_object(there / "config.json"), resolve_device(self.device))


def machine_of(on: MachineOptions, model: Path, folder: Path) -> MachineProfile:
    """The machine that options describe; what they leave out is that of the one at hand.

    model, folder: where the model and the spill file are, whose disks count.
    """
    import torch

    from qoff.budgets import memory_size, resolve_device
    from qoff.plan.machine import known_profile
    from qoff.plan.profile import MachineProfile

    if on.machine is not None:
        machine = MachineProfile.read(on.machine)
    else:
        device = resolve_device(on.device)
        if device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.set_device(device)  # whose working space is counted
        machine = known_profile(device, model, folder)
    if on.gpu is not None:
        machine = _with_gpu(machine, on.gpu, on.gpu_rates)
    elif on.host is not None and not machine.on_gpu:
        machine = machine.with_memory(device=memory_size("--host", on.host))
    if machine.on_gpu:
        machine = machine.with_memory(host=memory_size("--host", on.host))
    machine = machine.with_memory(disk=memory_size("--disk", on.disk))
    if on.link is not None:
        if not machine.on_gpu:
            raise ArgumentError(
                "--link is that to a GPU, and there is none; describe one with --gpu"
            )
        rate = rate_of("--link", on.link)
        machine = machine.with_link(rate, rate)
    if on.disk_rate is not None:
        rate = rate_of("--disk-rate", on.disk_rate)
        machine = replace(machine, disk_read=replace(machine.disk_read, bytes_per_s=rate))
    if on.disk_write_rate is not None:
        rate = rate_of("--disk-write-rate", on.disk_write_rate)
        machine = replace(machine, disk_write=replace(machine.disk_write, bytes_per_s=rate))
    return machine


def _with_gpu(machine: MachineProfile, size: str, rates: str) -> MachineProfile:
    from qoff.budgets import memory_size
    from qoff.plan.processor import Processor
    from qoff.plan.profile import Link

    memory, comma, flops = rates.partition(",")
    if not comma:
        raise ArgumentError(f"--gpu-rates is written like 1TB/s,100T, not {rates!r}")
    gpu = Processor.of(rate_of("--gpu-rates", memory), rate_of("--gpu-rates", flops))
    link = Link(_LINK, 1e-5)
    host = machine.usable["host"] if machine.on_gpu else machine.usable["device"]
    usable = {**machine.usable, "device": memory_size("--gpu", size) or 0, "host": host}
    note = (
        f"the GPU is taken to read its memory with {memory} and to do {flops}flop/s, and the CPU "
        f"beside it to be this machine's, with {machine.cores} cores"
    )
    return replace(
        machine,
        name=f"a GPU of {size}",
        on_gpu=True,
        device=gpu,
        to_device=link,
        from_device=link,
        usable=usable,
        notes=(*machine.notes, note),
    ).with_link(_LINK, _LINK)


def rate_of(option: str, text: str) -> float:
    """Units a second, of text like 25GB/s or 100T. Raises ArgumentError."""
    found = text.strip().removesuffix("/s").removesuffix("flop")
    try:
        rate = parse_size(found if found[-1:].lower() == "b" else f"{found}B")
    except QoffError as error:
        raise ArgumentError(f"{option}: {text!r} is not a rate; write it like 25GB/s") from error
    if rate <= 0:
        raise ArgumentError(f"{option}: {text!r} is not a rate above 0")
    if rate < _LEAST and not found[-1:].isalpha():
        raise ArgumentError(f"{option}: {text!r} has no unit; write it like 25GB/s")
    return float(rate)
