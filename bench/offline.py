"""Compiling variants of Triton kernels without a GPU, and what their artefacts show.

Registers and local memory (spills) come from `cuobjdump --dump-resource-usage` on the cubin; the
other figures from PTX, TTGIR and Triton's metadata.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import ptx, sass, series, ttgir
from bench.gpu_limits import LIMITS, WARP, blocks_per_sm
from bench.variants.shipped import shipped
from bench.variants.variant import (
    COPIED_AHEAD,
    FROM_REGISTERS,
    NO_SHARED_IN_LOOP,
    TENSOR_CORES,
    WIDE_CODES,
    Launch,
    Variant,
    recorded,
    stand_in,
)
from qoff.errors import OpError

_SCALES = "scale_min"  # the argument of kernels that leads to scales, which may be uint8 as codes
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Artefact:
    """One variant compiled for one compute capability. Bytes of shared memory are of a block."""

    op: str
    variant: str
    capability: int
    traits: tuple[str, ...] = ()
    error: str = ""  # why it does not compile; then all figures are zero
    warps: int = 0
    registers: int = 0  # of a thread
    spilled: int = 0  # bytes of local memory of a thread
    shared: int = 0
    tensor_cores: tuple[str, ...] = ()
    slow_dots: int = 0
    from_shared: int = 0  # see `ptx.Found`
    full_waits: int = 0  # for all `wgmma` under way, read only if a trait asks for it
    unset_reads: int = 0  # see `sass.unset_reads`
    overwritten: int = 0  # see `sass.overwritten`
    early: int = 0  # see `sass.early`, of a kernel that begins before others have ended
    code_widths: dict[str, int] = field(default_factory=dict)  # bits -> loads of codes
    code_bytes: int = 0  # of a block: tiles of codes that it loads, each load counted once
    wide_bytes: int = 0  # of a block: codes that loads of 128 bits and more bring
    waited_bytes: int = 0  # of a block: codes and compact scales that loops wait for
    converts_in_loop: int = 0
    shared_stores_in_loop: int = 0
    in_flight: int = 0  # bytes of a block
    waits: tuple[float, ...] = ()  # of each loop, see `series`
    seconds: float = 0.0  # that compiling took

    @property
    def blocks(self) -> int:
        """Blocks on an SM at once, at most."""
        return blocks_per_sm(self.capability, self.warps, self.registers, self.shared)

    def violations(self) -> list[str]:
        """What this variant should show and does not, each in a line that names it."""
        found = []
        limit = LIMITS[self.capability].shared_per_block
        if self.error:
            found.append(f"does not compile: {self.error}")
        elif self.shared > limit:
            found.append(f"takes {self.shared} bytes of shared memory; a block has {limit}")
        elif not self.blocks:
            found.append(f"does not fit an SM: {self.registers} registers, {self.warps} warps")
        if self.spilled:
            found.append(f"spills registers: {self.spilled} bytes of local memory in a thread")
        elif self.unset_reads:
            found.append(f"reads registers that nothing has set, in {self.unset_reads} places")
        elif self.overwritten:
            found.append(f"overwrites what `wgmma` still reads, in {self.overwritten} places")
        elif self.early:
            found.append(f"does not wait for kernels before, in {self.early} places")
        if not self.error:
            found += self._missing_traits()
        return [f"{self.op} {self.variant} sm_{self.capability}: {text}" for text in found]

    def _missing_traits(self) -> Iterator[str]:
        if TENSOR_CORES in self.traits and (not self.tensor_cores or self.slow_dots):
            yield f"{self.slow_dots} products without tensor cores (has {self.tensor_cores})"
        if FROM_REGISTERS in self.traits:
            if self.from_shared or "wgmma.mma_async" not in self.tensor_cores:
                yield f"{self.from_shared} of its {self.tensor_cores} read shared memory twice"
            if self.full_waits > 2:
                yield f"waits for all products in {self.full_waits} places"
        if WIDE_CODES in self.traits and not 0 < self.code_bytes <= self.wide_bytes:
            yield (
                f"128-bit loads bring {self.wide_bytes} of {self.code_bytes} bytes of codes; "
                f"loads by bits: {self.code_widths}"
            )
        if COPIED_AHEAD in self.traits and (self.waited_bytes or not self.code_bytes):
            yield f"waits for {self.waited_bytes} bytes of codes and scales in loops"
        if NO_SHARED_IN_LOOP in self.traits and self.shared_stores_in_loop:
            yield (
                f"{self.shared_stores_in_loop} stores to shared memory in the inner loop "
                f"({self.converts_in_loop} changes of layout)"
            )


def compile_variant(variant: Variant, capability: int, keep: Path | None = None) -> Artefact:
    """Compile for sm_`capability` and read the artefacts, which are left in folder `keep`.

    Goes with `stand_in` for the same capability. A variant that does not launch or compile gives an
    Artefact with its `error`.
    """
    try:
        launch = recorded(variant)
        compiled = launch.compiled(capability)
    except Exception as error:  # any error of the launcher or compiler is a result
        text = " ".join(str(error).split())[-400:]  # the reason stands last
        name = f"{type(error).__name__}: {text}"
        return Artefact(variant.op, variant.name, capability, tuple(variant.traits), name)
    if keep:
        stem = re.sub(r"[^\w.-]+", "_", f"{variant.op}-{variant.name}-sm{capability}")
        for kind in ("ttgir", "ptx", "cubin"):
            content = compiled.asm[kind]
            data = content if isinstance(content, bytes) else content.encode()
            (keep / f"{stem}.{kind}").write_bytes(data)
    return _read(variant, capability, launch, compiled)


def _read(variant: Variant, capability: int, launch: Launch, compiled: Any) -> Artefact:
    passed = [item for item in launch.signature.items() if item[1] != "constexpr"]
    scales = {i for i, (name, _) in enumerate(passed) if name == _SCALES}
    codes = {i for i, (_, kind) in enumerate(passed) if kind == "*u8"} - scales
    code, tiles = ptx.read(compiled.asm["ptx"]), ttgir.read(compiled.asm["ttgir"], scales)
    # Warp specialization adds warps; the PTX says how many threads a block has.
    declared = re.search(r"\.reqntid (\d+)", compiled.asm["ptx"])
    threads = int(declared[1]) if declared else WARP * launch.options["num_warps"]
    wide = [x for x in code.loads if x.arguments & codes and x.nbytes >= ptx.WIDE]
    registers, spilled = resource_usage(compiled.asm["cubin"])
    machine_code = _said(compiled.asm["cubin"], "nvdisasm", "-c", "-ndf")
    return Artefact(
        op=variant.op,
        variant=variant.name,
        capability=capability,
        traits=tuple(sorted(variant.traits)),
        warps=threads // WARP,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        tensor_cores=code.tensor_cores,
        slow_dots=tiles.slow_dots,
        from_shared=code.from_shared,
        full_waits=sass.full_waits(machine_code) if FROM_REGISTERS in variant.traits else 0,
        unset_reads=0 if spilled else sass.unset_reads(machine_code),
        overwritten=sass.overwritten(machine_code),
        early=sass.early(machine_code) if launch.options["launch_pdl"] else 0,
        code_widths={str(w): n for w, n in sorted(code.widths(codes).items())},
        code_bytes=tiles.code_bytes,
        waited_bytes=tiles.waited_bytes,
        wide_bytes=threads * sum(load.nbytes for load in wide),
        converts_in_loop=tiles.converts_in_loop,
        shared_stores_in_loop=code.shared_stores_in_loop,
        in_flight=max(tiles.buffer_bytes, threads * code.bytes_before_use),
        waits=tuple(round(each, 1) for each in series.waits(machine_code)),
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory (stack included) of a thread, as cuobjdump says."""
    said = _said(cubin, "cuobjdump", "--dump-resource-usage")
    usage = _USAGE.search(said)
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {said!r}")
    registers, stack, local = map(int, usage.groups())
    return registers, stack + local


def _said(cubin: bytes, tool: str, *options: str) -> str:
    """What one of the tools that come with Triton prints about a cubin."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [path, *options, file.name], capture_output=True, text=True, check=True
        ).stdout


def collect(
    ops: Sequence[str],
    capabilities: Sequence[int],
    jobs: int,
    keep: Path | None = None,
    few: bool = False,
) -> list[Artefact]:
    """Compile the variants of the ops for every capability, on `jobs` processes.

    An op is one of those that `shipped` lists, or the full name of any module that has `variants`.
    One that is not there gives an Artefact with its error per capability. few: see `shipped`.
    """
    found = []
    context = multiprocessing.get_context("fork")  # the ops are imported already
    for capability in capabilities:
        work = []
        for op in ops:
            try:
                count = len(list(variants_of(op, capability, few)))
            except Exception as error:  # a missing module, and whatever importing it raises
                text = f"{type(error).__name__}: {error}"
                found.append(Artefact(op, "variants", capability, (), text))
                continue
            work += [(op, capability, i, keep, few) for i in range(count)]
        # Processes of its own: launchers keep what they chose for a device.
        with ProcessPoolExecutor(jobs, context, stand_in, (capability,)) as pool:
            found += pool.map(_job, work, chunksize=4)
    return sorted(found, key=lambda a: (ops.index(a.op) if a.op in ops else -1, a.capability))


def variants_of(op: str, capability: int, few: bool) -> Iterable[Variant]:
    """The variants of an op, or those that a module lists; see `collect`."""
    if "." in op:
        variants: Iterable[Variant] = importlib.import_module(op).variants(capability)
        return variants
    found = [variant for variant in shipped(capability, few) if variant.op == op]
    if not found:
        raise OpError(f"there is no op {op!r}")
    return found


def _job(work: tuple[str, int, int, Path | None, bool]) -> Artefact:
    op, capability, index, keep, few = work
    variant = list(variants_of(op, capability, few))[index]
    start = time.perf_counter()
    found = compile_variant(variant, capability, keep)
    return replace(found, seconds=time.perf_counter() - start)


def as_json(found: Sequence[Artefact]) -> dict[str, Any]:
    """The artefacts and the version of Triton that made them."""
    import triton

    return {"triton": triton.__version__, "artefacts": [asdict(artefact) for artefact in found]}


def interpreted() -> bool:
    """Whether Triton runs as an interpreter in this process, where nothing can be compiled."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
