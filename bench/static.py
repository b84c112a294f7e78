"""Every variant of every Triton kernel, compiled without a GPU: the compass for tuning.

One line for a variant and an architecture: registers and spilled bytes of a thread, shared memory
of a block, how many blocks and warps an SM runs at once at most, bytes on their way from memory to
an SM, loads that a round of each loop waits for in series (`bench.series`), widths of the loads of
codes, tensor cores, changes of layout and stores to shared memory in inner loops. Exits with 1 if a
variant does not show what its traits ask for, and says which.

Bytes on their way: for asynchronous copies all buffers of the pipeline, for other loads what is
issued before the first use in the order of the PTX; times the blocks on an SM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_limits import CAPABILITIES, LIMITS
from bench.offline import Artefact, as_json, collect, interpreted
from bench.variants.shipped import shipped
from qoff.measure.tables import markdown

OPS = tuple(dict.fromkeys(variant.op for variant in shipped(90)))
JOBS = 2
_HEADER = (
    "variant", "sm", "warps", "regs", "spill", "shared", "blocks/SM", "warps/SM",
    "KiB in flight/SM", "waits", "code loads", "tensor cores", "converts", "st.shared",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", help="one of the ops, or a module with variants")
    parser.add_argument("--arch", type=int, action="append", choices=CAPABILITIES)
    parser.add_argument("--few", action="store_true", help="one variant of those that are alike")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--keep", type=Path, help="leave TTGIR, PTX and cubin in this folder")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes that compile")
    args = parser.parse_args(argv)
    if interpreted():
        parser.exit(2, "TRITON_INTERPRET is set: Triton compiles nothing in this process\n")
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    found = collect(args.op or OPS, args.arch or CAPABILITIES, args.jobs, args.keep, args.few)
    print(markdown(_HEADER, [_row(artefact) for artefact in found], right=len(_HEADER) - 1))
    for op in dict.fromkeys(a.op for a in found):
        mine = [a.seconds for a in found if a.op == op]
        print(f"{op}: {len(mine)} variants, {sum(mine):.0f} s to compile")
    violations = [line for artefact in found for line in artefact.violations()]
    print(f"{len(found)} compiled, {len(violations)} violations", *violations, sep="\n")
    if args.json:
        args.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
    return 1 if violations else 0


def _row(a: Artefact) -> tuple[str, ...]:
    name = f"{a.op} {a.variant}"
    if a.error:
        return (name, str(a.capability), a.error[:60])
    blocks = a.blocks
    return (
        name,
        str(a.capability),
        str(a.warps),
        str(a.registers),
        str(a.spilled),
        str(a.shared),
        str(blocks),
        f"{blocks * a.warps}/{LIMITS[a.capability].warps}",
        f"{blocks * a.in_flight / 1024:.1f}",
        " ".join(f"{each:.1f}" for each in a.waits) or "-",
        " ".join(f"{n}x{bits}b" for bits, n in a.code_widths.items()) or "-",
        " ".join(kind.partition(".")[0] for kind in a.tensor_cores) or "-",
        str(a.converts_in_loop),
        str(a.shared_stores_in_loop),
    )


if __name__ == "__main__":
    sys.exit(main())
