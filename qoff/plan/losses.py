"""The fastest plan whose bits of weights and KV cache lose no more than a bound.

Losses are KL from the model in floats, nats a token: those of a sweep of the same model
(`qoff eval MODEL --sweep`), or, assumed, those of docs/accuracy.md, of a model of 135M parameters.
Between two of these there are mixtures, as `qoff convert --target-bits` makes them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qoff.checkpoint import QuantEntry
from qoff.errors import ArgumentError, BudgetError, FormatError
from qoff.kernels.layout.heads import HeadShape
from qoff.kvcache import KVQuant
from qoff.kvcache.quant import UnpackableError
from qoff.schema import is_number

from .forms import WeightForm, stored_bits
from .manual import Plan
from .profile import MachineProfile
from .search import find_plan
from .sizes import Sizes
from .workload import Workload

# Of the text that loses most: gptq, off their grid; rtn.
_WEIGHTS = {(3, 32): 0.22, (4, 64): 0.078, (4, 32): 0.055, (5, 32): 0.017, (8, 32): 0.0002}
_HEADS = {64: 0.0065, 32: 0.0042}  # 6 bits, float16 scales; of hqq and rtn what loses more
_CACHES = {(4, 4): 0.0232, (8, 4): 0.0061}  # of the text that loses more
_WEIGHTS_NAME = re.compile(r"(\d) bits, group (\d+), (\w+)")
_CACHE_NAME = re.compile(r"(\d),(\d), window (\d+)")
_AS_THEY_ARE = "as they are"
_STEP = 0.05  # bits a weight, from those of the fewer bits with scales up


@dataclass(frozen=True)
class Form:
    """What is stored in how many bits, and what it loses.

    weights: None for those of a checkpoint as they are.
    """

    weights: WeightForm | None
    kv: KVQuant
    loss: float
    assumed: bool = False

    def __str__(self) -> str:
        weights = "weights as they are" if self.weights is None else str(self.weights)
        return f"{weights}, KV cache of {self.kv.k_bits},{self.kv.v_bits} bits"


def assumed_forms(converted: bool) -> list[Form]:
    """Those of docs/accuracy.md; losses of layers' weights, of the head and of the cache are added.

    converted: the weights are what they are, and only the cache counts.
    """
    caches = {KVQuant(*bits): loss for bits, loss in _CACHES.items()}
    if converted:
        return [Form(None, kv, loss, True) for kv, loss in caches.items()]
    weights = {WeightForm(*f, "gptq" if f[0] < 8 else "rtn"): x for f, x in _WEIGHTS.items()}
    return [
        Form(form, kv, loss + _HEADS[form.group_size] + more, True)
        for form, loss in weights.items()
        for kv, more in caches.items()
    ]


def measured_forms(path: Path) -> list[Form]:
    """The cells of a sweep with a packed KV cache; path: its folder, or its JSON.

    Raises FormatError for a file that is none, or has no such cell with a loss.
    """
    file = path / "results.json" if path.is_dir() else path
    if not file.exists():
        raise FormatError(
            f"{path}: has no {file.name}, which qoff eval MODEL --sweep writes; give the folder of "
            "a sweep"
        )
    try:
        cells = json.loads(file.read_text())
        found = [form for cell in cells if (form := _form(cell)) is not None]
    except (OSError, ValueError, TypeError, AttributeError, ArgumentError) as error:
        raise FormatError(f"{file}: is no result of qoff eval --sweep ({error})") from error
    if not found:
        raise FormatError(
            f"{file}: no cell has a packed KV cache and a KL; measure with qoff eval MODEL --sweep "
            "--reference MODEL"
        )
    return found


def _form(cell: Mapping[str, Any]) -> Form | None:
    cache, loss = _CACHE_NAME.fullmatch(cell.get("kv", "")), cell.get("mean_kl")
    if cache is None or loss is None or not is_number(loss):
        return None
    k_bits, v_bits, window = map(int, cache.groups())
    kv = KVQuant(k_bits, v_bits, window)
    name = cell.get("weights", "")
    if name == _AS_THEY_ARE:
        return Form(None, kv, float(loss))
    weights = _WEIGHTS_NAME.fullmatch(name)
    if weights is None:
        return None
    bits, group, solver = weights.groups()
    return Form(WeightForm(int(bits), int(group), solver), kv, float(loss))


def mixtures(forms: Sequence[Form], most: float) -> list[Form]:
    """Of fewer and more bits, the smallest that lose at most `most`, for each KV cache.

    One between the form that loses just more and the one that loses just less, of as large groups,
    where there are both: what it loses is taken to be in proportion. Less is true, as the matrices
    that lose most have more bits.
    """
    found = list[Form]()
    for kv, group in dict.fromkeys((f.kv, f.weights.group_size) for f in forms if f.weights):
        some = [
            (form, form.weights.bits)
            for form in forms
            if form.weights and (form.kv, form.weights.group_size) == (kv, group)
        ]
        low, few = max(
            ((form, bits) for form, bits in some if form.loss > most),
            key=lambda one: one[1],
            default=(None, 0),
        )
        high, many = min(
            ((form, bits) for form, bits in some if form.loss <= most and bits > few),
            key=lambda one: one[1],
            default=(None, 0),
        )
        if low is None or low.weights is None or high is None:
            continue
        steps = (many - few) / _STEP
        part = math.ceil(steps * (low.loss - most) / (low.loss - high.loss)) / steps
        if part < 1:
            bits = stored_bits(few, group) + part * (many - few)
            mixed = replace(low.weights, target_bits=round(bits, 4))
            loss = low.loss + part * (high.loss - low.loss)
            found.append(Form(mixed, kv, loss, low.assumed))
    return found


def packable(forms: Sequence[Form], shapes: Sequence[HeadShape]) -> list[Form]:
    """Those whose KV cache a model has: latent K and V have the same bits.

    All of them where it has none, so that the first plan says why.
    """

    def packs(kv: KVQuant) -> bool:
        try:
            return bool(kv.packed_forms(shapes))
        except UnpackableError:
            return False

    return [form for form in forms if packs(form.kv)] or list(forms)


def storable(forms: Sequence[Form], sizes: Sizes) -> list[Form]:
    """Those whose groups divide the columns of all matrices; weights as they are have theirs."""
    entries = (entry for file in sizes.checkpoint.files for entry in file.weights.values())
    columns = {entry.shape[1] for entry in entries if isinstance(entry, QuantEntry)}
    return [
        form
        for form in forms
        if form.weights is None or not any(n % form.weights.group_size for n in columns)
    ]


def best_form(
    forms: Sequence[Form],
    most: float,
    sizes_of: Callable[[WeightForm | None], Sizes],
    machine_of: Callable[[Sizes], MachineProfile],
    workload: Workload,
    template: Plan,
) -> Form:
    """The form that loses at most `most` and has the fastest plan.

    Of those as fast, the one that loses least. machine_of: the machine beside such a checkpoint,
    or BudgetError where it has no room for one. Raises ArgumentError where all lose more,
    BudgetError where no plan of any fits, with what the smallest form would need.
    """
    finest = min((form.weights for form in forms), key=lambda how: how.group_size if how else 0)
    sizes = sizes_of(finest)
    forms = packable(storable(forms, sizes), sizes.shapes)
    allowed = [form for form in forms if form.loss <= most]
    allowed += mixtures(forms, most)
    if not allowed:
        least = min(forms, key=lambda form: form.loss)
        raise ArgumentError(
            f"a loss of at most {most:g} nats a token is less than that of any form: {least} loses "
            f"{least.loss:.3g}; allow {1.01 * least.loss:.3g}"
        )
    found, refusal = list[tuple[float, float, Form]](), BudgetError("")
    allowed.sort(key=lambda form: (sizes_of(form.weights).nbytes, form.kv.k_bits + form.kv.v_bits))
    for form in reversed(allowed):  # the smallest last, whose refusal counts
        try:
            sizes, own = sizes_of(form.weights), replace(template, kv=form.kv)
            seconds = find_plan(sizes, machine_of(sizes), workload, own).seconds
        except BudgetError as error:
            refusal = BudgetError(f"{form}: {error}")
            continue
        found.append((round(seconds, 6), form.loss, form))
    if not found:
        raise refusal
    return min(found, key=lambda one: one[:2])[2]
