"""What has changed between two results, beyond noise.

A change is beyond noise if both hold: a rank-sum test of the samples finds it less likely than
`ALPHA` that they come from one distribution, and the medians differ by `THRESHOLD` at least.
Samples of one run share what moves from run to run (where memory lies, clocks, neighbours), which
no test of theirs can see; that is what the threshold is for. Between two kept runs of
`bench.cpu_decode` on one virtual machine, short decode of llama.cpp and of transformers, whose
versions were the same, fell by 9 %, each with the least p that five samples can have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scipy.stats import mannwhitneyu

from qoff.errors import FormatError, QoffError

from .results import BenchResult
from .samples import Samples

ALPHA = 0.01
THRESHOLD = 0.1
TEST = f"exact rank-sum test, p < {ALPHA:g}"
Verdict = Literal["faster", "slower", "within noise", "too few samples"]

_EXPLAINS = "beside"  # figures under it say why others are as they are
_PASSING = ("load_1min",)  # of a machine, different at any moment
_SECONDS, _PER_SECOND = "seconds", "per_s"


@dataclass(frozen=True)
class Change:
    """One figure, before and after. p: of the test, for no difference at all."""

    name: str
    before: Samples
    after: Samples
    p: float
    verdict: Verdict

    @property
    def relative(self) -> float:
        """By what part the median has grown."""
        return self.after.median / self.before.median - 1

    @staticmethod
    def of(
        name: str,
        before: Samples,
        after: Samples,
        more_is_faster: bool,
        threshold: float = THRESHOLD,
    ) -> Change:
        """Compare two samples."""
        p = float(mannwhitneyu(before.values, after.values, method="exact").pvalue)
        grown = after.median / before.median - 1
        verdict: Verdict = "within noise"
        counts = len(before.values), len(after.values)
        if 2 / math.comb(sum(counts), counts[0]) >= ALPHA:  # the least p of so many samples
            verdict = "too few samples"
        elif p < ALPHA and abs(grown) >= threshold:
            verdict = "faster" if (grown > 0) == more_is_faster else "slower"
        return Change(name, before, after, p, verdict)


def compare(a: BenchResult, b: BenchResult, threshold: float = THRESHOLD) -> list[Change]:
    """Every figure that both have samples of, in the order of `a`; b is what came after.

    Raises FormatError for samples that are not positive numbers, QoffError where nothing is common.
    """
    before, after = dict(samples_of(a)), dict(samples_of(b))
    found = [
        Change.of(" / ".join(path), samples, after[path], more_is_faster(path, a.unit), threshold)
        for path, samples in before.items()
        if path in after
    ]
    if not found:
        raise QoffError(
            f"the results have no figure in common: {len(before)} of {a.bench} ({a.date}), "
            f"{len(after)} of {b.bench} ({b.date}); compare runs of one bench with the same cases"
        )
    return found


def samples_of(result: BenchResult) -> Iterator[tuple[tuple[str, ...], Samples]]:
    """(names from the outermost to the innermost, samples) of all that was sampled.

    Raises FormatError for samples that are not positive numbers.
    """
    yield from _walk(result.measured, ())


def more_is_faster(path: tuple[str, ...], unit: str) -> bool:
    """Whether a figure of these names is a rate, as everything is that is not in seconds.

    unit: of figures whose names have none.
    """
    if any(name.endswith(_PER_SECOND) for name in path):
        return True
    if _SECONDS in path or path[-1].endswith("_s"):
        return False
    return unit != "s"


def differences(a: BenchResult, b: BenchResult) -> list[str]:
    """A line for each circumstance in which two results differ, apart from the date."""
    lines = [] if a.bench == b.bench else [f"bench: {a.bench}, then {b.bench}"]
    for what in ("machine", "versions", "settings"):
        before, after = getattr(a, what), getattr(b, what)
        for key in dict.fromkeys([*before, *after]):
            values = before.get(key, "not said"), after.get(key, "not said")
            if key not in _PASSING and values[0] != values[1]:
                lines.append(f"{what}: {key}: {values[0]}, then {values[1]}")
    return lines


def _walk(found: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[Any, Samples]]:
    for name, value in found.items():
        here = (*path, name)
        if name == _EXPLAINS or not isinstance(value, Mapping):
            continue
        if "median" in value and "values" in value:
            yield here, _samples(value["values"], here)
        else:
            yield from _walk(value, here)


def _samples(values: Any, path: tuple[str, ...]) -> Samples:
    numbers = values if isinstance(values, list | tuple) else []
    good = [x for x in numbers if isinstance(x, int | float) and math.isfinite(x) and x > 0]
    if not good or len(good) < len(numbers):
        raise FormatError(
            f"the samples of {' / '.join(path)} are not all positive numbers; measure again"
        )
    return Samples(tuple(map(float, good)))
