"""Every shipped variant of every Triton kernel compiles for every architecture, and compiles well.

Nothing here needs a GPU: `bench.static` compiles in a process of its own (here Triton may be an
interpreter), and the figures come from what the compiler made. The pinned Triton is always used;
Triton 3.6.0 too where a folder holds it: the one that the environment variable QOFF_TRITON_36
names, by default .triton-3.6, which `make triton-3.6` fills.

Compiling takes minutes. By default it is for one architecture, and of each kernel one variant for
each type, set of traits and kind of scales; if QOFF_ALL_ARCHITECTURES is set it is all (`make
architectures`: after a change of a kernel). The first worker of a run that needs the figures
compiles, the others wait for it; and .pytest_cache keeps them until a kernel, the bench or Triton
changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import pytest

from bench import sass, static
from bench.gpu_limits import CAPABILITIES, LIMITS, blocks_per_sm
from bench.offline import Artefact, collect
from bench.static import OPS
from bench.variants.shipped import shipped
from bench.variants.variant import FROM_REGISTERS

ROOT = Path(__file__).resolve().parents[2]
OLDER = Path(os.environ.get("QOFF_TRITON_36") or ROOT / ".triton-3.6")
BAD = "tests.kernels.bad_kernels"
CACHE = ROOT / ".pytest_cache" / "static"
ELSEWHERE = ("cpu", "reference")  # of kernels/

# The first test waits until all variants are compiled.
pytestmark = pytest.mark.timeout(900)
EVERYTHING = bool(os.environ.get("QOFF_ALL_ARCHITECTURES"))
ARCHITECTURES = CAPABILITIES if EVERYTHING else (90,)
OPTIONS = [] if EVERYTHING else ["--few"]
for choice, values in (("--op", (*OPS, BAD)), ("--arch", ARCHITECTURES)):
    OPTIONS += [option for value in values for option in (choice, str(value))]


@pytest.fixture(scope="session", params=["pinned", "3.6.0"])
def compiled(request: pytest.FixtureRequest, shared: Path) -> list[Artefact]:
    """What is to be compiled for all architectures, compiled by one version of Triton."""
    older = request.param == "3.6.0"
    if older and not (OLDER / "triton").is_dir():
        pytest.skip(f"no Triton 3.6.0 in {OLDER}: make triton-3.6, or name one by QOFF_TRITON_36")
    version, found = compiled_once(shared, request.param, older=older)
    assert not older or version == request.param, f"{OLDER} holds Triton {version}"
    return found


def compiled_once(shared: Path, name: str, older: bool = False) -> tuple[str, list[Artefact]]:
    """What `compile_all` returns, compiled by the first worker of a run that asks for it.

    Kept in .pytest_cache if nothing was wrong with what should be right, so that no passing trouble
    stays.
    """
    file = f"{name}-{digest(older)}.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in (CACHE / file, shared / file):
            if path.exists():
                return read(path)
        version, found = compile_all(shared / file, older)
        if not any(artefact.violations() for artefact in found if artefact.op != BAD):
            CACHE.mkdir(parents=True, exist_ok=True)
            for outdated in CACHE.glob(f"{name}-*.json"):
                outdated.unlink()
            shutil.copy(shared / file, CACHE / "partial")
            (CACHE / "partial").replace(CACHE / file)
        return version, found


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run have."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def digest(older: bool) -> str:
    """Changes with the sources of kernels and bench, the options and Triton's version."""
    sha = hashlib.sha256(repr((OPTIONS, sys.version)).encode())
    for path in sorted(set(sources())):
        sha.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    version = (OLDER / "triton" / "__init__.py").read_text() if older else version_of("triton")
    sha.update(version.encode())
    return sha.hexdigest()[:16]


def sources() -> Iterator[Path]:
    """The files that decide what is compiled. Ops of the CPU and in torch do not."""
    for path in (ROOT / "kernels").rglob("*"):
        if path.suffix in (".py", ".json") and path.parts[len(ROOT.parts) + 1] not in ELSEWHERE:
            yield path
    for name in ("static", "offline", "ptx", "sass", "series", "ttgir", "gpu_limits"):
        yield ROOT / "bench" / f"{name}.py"
    yield from (ROOT / "bench" / "variants").glob("*.py")
    yield ROOT / Path(*BAD.split(".")).with_suffix(".py")


def compile_all(path: Path, older: bool) -> tuple[str, list[Artefact]]:
    """Run bench.static without a GPU or interpreter; returns Triton's version and what it found."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_DISABLE_LINE_INFO"] = "1"  # nobody debugs what is thrown away
    if older:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OLDER), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "bench.static", "--json", str(path), *OPTIONS]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert path.is_file(), f"bench.static ended with {run.returncode}:\n{run.stderr[-4000:]}"
    version, found = read(path)
    assert run.returncode == 1, run.stderr  # of the bad ones
    return version, found


def read(path: Path) -> tuple[str, list[Artefact]]:
    """Triton's version and the artefacts of a file that bench.static wrote."""
    content: dict[str, Any] = json.loads(path.read_text())
    found = [Artefact(**{**a, "traits": tuple(a["traits"])}) for a in content["artefacts"]]
    return content["triton"], found


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("op", OPS)
def test_variants_compile_well(compiled: list[Artefact], op: str, capability: int) -> None:
    mine = [a for a in compiled if (a.op, a.capability) == (op, capability)]
    assert mine, f"{op} lists no variant for sm_{capability}"
    names = [artefact.variant for artefact in mine]
    assert len(names) == len(set(names)), f"{op} has variants of the same name"
    violations = [line for artefact in mine for line in artefact.violations()]
    assert not violations, "\n".join(violations)


def test_the_committed_figures_are_of_two_versions_and_good() -> None:
    found = [read(path) for path in (ROOT / "bench" / "results").glob("static-*.json")]
    assert {version for version, _ in found} == {"3.6.0", "3.9.0"}
    for _, artefacts in found:
        assert [line for artefact in artefacts for line in artefact.violations()] == []
    registers = [FROM_REGISTERS in a.traits for _, artefacts in found for a in artefacts]
    assert sum(registers) == 2 * (11 + 2)  # of the matmul, and of experts


def test_every_kernel_has_a_variant() -> None:
    modules = (ROOT / "kernels" / "triton").rglob("*.py")
    kernels = {k for p in modules for k in re.findall(r"^def (\w+_kernel)\(", p.read_text(), re.M)}
    for few in (True, False):
        listed = {variant.kernel for arch in (75, 80, 90) for variant in shipped(arch, few)}
        assert listed == kernels


def test_there_is_no_error_status_without_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Artefact("rope", "good", 90, registers=32, warps=4)
    monkeypatch.setattr(static, "interpreted", lambda: False)
    monkeypatch.setattr(static, "collect", lambda *args: [good])
    assert static.main([]) == 0


@pytest.fixture
def bad(compiled: list[Artefact]) -> dict[str, Artefact]:
    return {a.variant: a for a in compiled if (a.op, a.capability) == (BAD, 90)}


@pytest.mark.parametrize(
    ("variant", "complaint"),
    [
        ("spills", "spills registers: "),
        ("narrow", "128-bit loads bring 0 of 4096 bytes of codes"),
        ("narrow-pairs", "128-bit loads bring 0 of 4096 bytes of codes"),
        ("narrow-wide-scales", "128-bit loads bring 0 of 2048 bytes of codes"),
        ("no-tensor-cores", "1 products without tensor cores"),
        ("no-product", "0 products without tensor cores"),
        ("weights-in-shared", "read shared memory twice"),
        ("not-ahead", "waits for 4096 bytes of codes and scales in loops"),
        ("shared-in-loop", "stores to shared memory in the inner loop"),
        ("unknown", "no_such_name is not defined"),
        ("waits-for-products", "waits for all products in"),
        ("large", f"bytes of shared memory; a block has {227 << 10}"),
    ],
)
def test_a_bad_variant_is_refused(bad: dict[str, Artefact], variant: str, complaint: str) -> None:
    violations = bad[variant].violations()
    assert any(complaint in line for line in violations), violations
    assert all(line.startswith(f"{BAD} {variant} sm_90: ") for line in violations)


@pytest.mark.parametrize("variant", ["right", "right-narrow-scales"])
def test_a_good_variant_is_not_refused(bad: dict[str, Artefact], variant: str) -> None:
    artefact = bad[variant]
    assert artefact.violations() == []
    assert artefact.code_bytes > 0
    assert artefact.registers > 0


def test_an_op_that_is_not_there_is_named() -> None:
    found = collect(["no_such_op"], [90], 1)
    assert [line for a in found for line in a.violations()] == [
        "no_such_op variants sm_90: does not compile: OpError: there is no op 'no_such_op'"
    ]


@pytest.mark.parametrize(
    ("instruction", "reads"),
    [
        ("LDC R1, c[0x0][0x28] ;", 0),
        ("IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;", 0),
        ("PRMT R11, R1, 0x5410, R74 ;", 0),
        ("@P0 PRMT R5, R1.reuse, 0x5410, R99 ;", 0),
        ("IADD3 R10, P1, R11, UR1, RZ ;", 0),
        ("IADD3 R4, P0, R1, 0x40, RZ ;", 1),
        ("@!P0 IADD3.X R4, R1, -0x7fffffe0, RZ, P0, !PT ;", 1),
    ],
)
def test_reads_of_a_register_that_nothing_has_set(instruction: str, reads: int) -> None:
    machine_code = f"        /*0470*/                   {instruction}\n"
    assert sass.unset_reads(machine_code) == reads


@pytest.mark.parametrize(
    ("before", "wait", "places"),
    [
        ("LDC R1, c[0x0][0x28]", "ACQBULK", 0),
        ("@P0 LDG.E R4, desc[UR4][R2.64]", "ACQBULK", 1),
        ("@P0 EXIT", "ACQBULK", 1),
        ("PREEXIT", "NOP", 3),
    ],
)
def test_what_comes_before_the_wait_for_other_kernels(before: str, wait: str, places: int) -> None:
    after = ["LDGSTS.E [R21], desc[UR12][R150.64]", "STG.E desc[UR4][R2.64], R4", "EXIT"]
    lines = [
        f"        /*{16 * i:04x}*/    {text} ;" for i, text in enumerate([before, wait, *after])
    ]
    assert sass.early("\n".join(lines)) == places


_LOOP = """
.L_x_0:
        /*0010*/                   MOV R{spare}, 0x64006400 ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x64x16.F32 R24, R84, gdesc[UR20], R24 ;
        /*0040*/                   HGMMA.64x64x16.F32 R24, R88, gdesc[UR20], R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0060*/                   HGMMA.64x64x16.F32 R24, R92, gdesc[UR20], R24, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, {running} ;
        /*0080*/                   LDS.128 R{loaded}, [R4+0x30020] ;
        /*0090*/                   STS.64 [R92], R94 ;
        /*00a0*/               @P0 BRA `(.L_x_0) ;
        /*00b0*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("spare", "loaded", "running", "places"),
    [
        (96, 100, "0x1", 0),  # other registers
        (84, 88, "0x1", 0),  # products that have ended
        (93, 100, "0x1", 1),  # by the next round
        (96, 89, "0x1", 1),  # the last of four registers
        (93, 89, "0x0", 0),
    ],
)
def test_registers_that_products_still_read(
    spare: int, loaded: int, running: str, places: int
) -> None:
    machine_code = _LOOP.format(spare=spare, loaded=loaded, running=running)
    assert sass.overwritten(machine_code) == places


@pytest.mark.parametrize(
    ("capability", "warps", "registers", "shared", "blocks"),
    [
        (80, 4, 32, 0, 16),  # 64 warps
        (80, 1, 32, 0, 32),  # 32 blocks
        (80, 4, 255, 0, 2),  # 65536 registers, 8192 for a warp: 8 warps
        (89, 4, 80, 0, 6),  # 25 warps by registers, 24 in fours
        (90, 4, 32, 100 << 10, 2),  # 101 KiB each of 228
        (90, 4, 32, 228 << 10, 0),
        (75, 4, 32, 32 << 10, 2),
        (120, 4, 32, 48 << 10, 2),
        (120, 64, 32, 0, 0),
    ],
)
def test_occupancy(capability: int, warps: int, registers: int, shared: int, blocks: int) -> None:
    assert blocks_per_sm(capability, warps, registers, shared) == blocks
    assert LIMITS[capability].shared_per_block < 228 << 10
