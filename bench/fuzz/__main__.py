"""Damaged inputs of every kind, in forked children: no foreign exception, hang, crash or excess.

    python -m bench.fuzz --seconds 60 --seed 1
    python -m bench.fuzz --target gguf --seed 1 --input 1234 --edits 0,2   # one of them again

What is wrong with an input has to be one line of `qoff.errors`. A finding is another exception,
more than 2 s of CPU time, a process that dies, or half a gigabyte of memory; its input is reduced
to the edits that it needs. The status is 1 where there are findings.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from . import corpus, requests, targets
from .children import Finding, run_all
from .targets import Target

_WARMUP = 25  # unchanged inputs of each kind, of which some have different beginnings
_AT_ONCE = 20000  # inputs that are dealt out to children


class Fuzzer:
    """Inputs by number: the same for a seed, whatever was run before."""

    def __init__(self, folder: Path, seed: int, only: str | None) -> None:
        found = {**targets.files(folder), **requests.targets(folder / "checkpoint")}
        self.targets: dict[str, Target] = found
        names = [only] if only else [name for name, one in found.items() for _ in range(one.share)]
        Random(0).shuffle(names)
        self._names, self._seed = names, seed
        for one in found.values():  # what is imported for them is there before children are forked
            for warmup in range(_WARMUP):
                with suppress(Exception):
                    one.run(one.start(Random(warmup)))
        gc.collect()
        gc.freeze()  # or each child's collector would copy all pages

    def target(self, number: int) -> str:
        """The kind of an input."""
        return self._names[number % len(self._names)]

    def edits(self, number: int) -> int:
        """How many edits an input has."""
        return Random(f"{self._seed}/{number}").choice((1, 1, 1, 2, 2, 3, 4, 8))

    def value(self, number: int, kept: Sequence[int]) -> Any:
        """An input with some of its edits."""
        target = self.targets[self.target(number)]
        value = target.start(Random(f"{self._seed}/{number}/start"))
        for edit in kept:
            value = target.edit(value, Random(f"{self._seed}/{number}/{edit}"))
        return value

    def run(self, number: int, kept: Sequence[int] | None = None) -> None:
        """Run an input; raises what qoff raises."""
        chosen = range(self.edits(number)) if kept is None else kept
        self.targets[self.target(number)].run(self.value(number, chosen))

    def reduced(self, finding: Finding) -> list[int]:
        """The edits without which the input has another outcome."""
        kept = list(range(self.edits(finding.number)))
        for edit in list(kept):
            fewer = [x for x in kept if x != edit]
            if any(
                isinstance(one, Finding) and one.signature == finding.signature
                for one in run_all([finding.number], partial(self.run, kept=fewer))
            ):
                kept = fewer
        return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run inputs for some seconds, or one of them; the number of faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, help="stop after so many")
    parser.add_argument("--target", help="one kind of inputs alone")
    parser.add_argument("--input", type=int, help="the number of one input, run here")
    parser.add_argument("--edits", help="of that input: numbers of edits, like 0,2; default all")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        corpus.write(Path(name))
        fuzzer = Fuzzer(Path(name), args.seed, args.target)
        if args.input is not None:
            return _one(fuzzer, args.input, args.edits)
        return _many(fuzzer, args)


def _one(fuzzer: Fuzzer, number: int, edits: str | None) -> int:
    kept = None if edits is None else [int(x) for x in edits.split(",") if x]
    print(repr(fuzzer.value(number, kept or range(fuzzer.edits(number))))[:2000])
    try:
        fuzzer.run(number, kept)
    except Exception:
        traceback.print_exc()
    return 0


def _many(fuzzer: Fuzzer, args: argparse.Namespace) -> int:
    start, done = time.perf_counter(), Counter[str]()
    faults: dict[tuple[str, str, str], tuple[int, Finding]] = {}
    end = sys.maxsize if args.inputs is None else args.inputs
    for first in range(0, end, _AT_ONCE):
        if time.perf_counter() - start > args.seconds:
            break
        for one in run_all(range(first, min(first + _AT_ONCE, end)), fuzzer.run):
            if isinstance(one, Finding):
                key = (fuzzer.target(one.number), *one.signature)
                faults[key] = (
                    faults[key][0] + 1 if key in faults else 1,
                    faults.get(key, (0, one))[1],
                )
            else:
                done[fuzzer.target(one)] += 1
            if time.perf_counter() - start > args.seconds:
                break
    seconds, total = time.perf_counter() - start, sum(done.values())
    for name, number in done.most_common():
        print(f"{number:8} {name}")
    print(f"{total:8} inputs in {seconds:.1f} s: {total / seconds:.0f}/s; {len(faults)} faults")
    for (target, kind, where), (times, finding) in faults.items():
        edits = ",".join(map(str, fuzzer.reduced(finding)))
        print(f"{times} x {target}: {kind} at {where or '?'}: {finding.message}")
        only = f"--target {args.target} " if args.target else ""
        print(
            f"    python -m bench.fuzz {only}--seed {args.seed} --input {finding.number} "
            f"--edits {edits}"
        )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
