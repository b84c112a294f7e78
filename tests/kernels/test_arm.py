"""The CPU kernels' dot products, compiled for ARM: there is no such processor to run them on."""

from collections.abc import Callable
from dataclasses import fields

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from qoff.kernels.cpu.jit import emit
from qoff.kernels.cpu.linear import tile


def assembly(cpu: str, arguments: int, emit_body: Callable) -> list[str]:
    """The instructions of a function of int64 arguments, by name, for a processor of ARM."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    module = ir.Module()
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [emit.I64] * arguments)
    function = ir.Function(module, kind, "f")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_body(builder, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=2)
    text = machine.emit_assembly(llvm.parse_assembly(str(module)))
    return [line.split()[0] for line in text.splitlines() if line.startswith("\t")]


@pytest.mark.parametrize(
    ("cpu", "features", "bits", "instruction", "each"),
    [
        ("neoverse-n1", {"dotprod"}, 4, "sdot", 1),
        ("neoverse-n1", {"dotprod"}, 8, "sdot", 3),
        ("neoverse-v1", {"i8mm"}, 4, "usdot", 1),
    ],
    ids=["dotprod", "dotprod-8-bits", "i8mm"],
)
def test_a_tile_is_dot_products_of_bytes(
    cpu: str, features: set[str], bits: int, instruction: str, each: int
) -> None:
    def body(b: ir.IRBuilder, *operands: ir.Value) -> None:
        tile.emit_tile(b, bits, 2, 4, 1, tile.Operands(*operands), features)

    names = assembly(cpu, len(fields(tile.Operands)), body)
    registers = 4  # of a vector of 16 sums
    assert names.count(instruction) == each * registers * 2 * 4 * (tile.UNROLL // 4)
    assert not {"smull", "umull", "bl"} & set(names)  # no plain products, no calls
