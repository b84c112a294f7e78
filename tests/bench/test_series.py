"""Loads that a round of a loop waits for in series, by machine code as `nvdisasm` prints it."""

from __future__ import annotations

import pytest

from bench.series import waits

_LENGTH = 50  # instructions


def _loop(*lines: str) -> str:
    lines += ("FADD R90, R90, R91",) * (_LENGTH - len(lines)) + ("@P0 BRA `(.L_x_1)",)
    code = [f"        /*{i:04x}*/                   {line} ;" for i, line in enumerate(lines)]
    return "\n".join([".L_x_1:", *code])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["FADD R1, R2, R3"], 0),
        (["LDG.E R4, desc[UR4][R2.64]", "FADD R5, R4, R4"], 1),
        # Both are on their way at once.
        (["LDG.E R4, desc[UR4][R2.64]", "LDG.E R5, desc[UR4][R2.64+0x8]", "FADD R6, R4, R5"], 1),
        # Of the second one the first is the address.
        (["LDG.E.64 R4, desc[UR4][R2.64]", "LDG.E R6, desc[UR4][R4.64]", "FADD R7, R6, R6"], 2),
        (["LDG.E.128 R4, desc[UR4][R2.64]", "STS.128 [R9], R4", "BAR.SYNC 0x0"], 1),
        (["LDG.E.128 R4, desc[UR4][R2.64]", "FADD R8, R7, R7"], 1),  # the last of its registers
        (["LDGSTS.E.128 [R9], desc[UR4][R2.64]", "LDS R4, [R9]", "FADD R5, R4, R4"], 0),
        (["@P1 LDG.E R4, desc[UR4][R2.64]", "@!P1 FADD R5, R4, R4"], 1),
        (["LDG.E R4, desc[UR4][R2.64]", "HMMA.16816.F32 R8, R12, R3, R8"], 1),  # two of R3
        # What the round before loaded, and had time for.
        (["FADD R5, R4, R4", "LDG.E R4, desc[UR4][R2.64]", *["MUFU.EX2 R6, R6"] * 60], 0),
    ],
)
def test_loads_in_series_are_counted(lines: list[str], expected: float) -> None:
    assert waits(_loop(*lines)) == [pytest.approx(expected, abs=0.1)]


def test_short_loops_and_code_without_loops_have_no_line() -> None:
    assert waits("        /*0000*/                   LDG.E R4, desc[UR4][R2.64] ;") == []
    assert waits(_loop("LDG.E R4, desc[UR4][R2.64]").replace("FADD", "NOP")[-300:]) == []
