"""Plans in files: what `qoff plan --save` writes, and `qoff.LLM` and the commands read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from qoff.errors import ArgumentError, FormatError, QuantizationError
from qoff.kvcache import KVPlacement, KVQuant
from qoff.quant import QuantConfig
from qoff.schema import is_number, read_object, shown

from .forms import WeightForm
from .manual import Plan

_VERSION, _WEIGHTS = 1, "weights"


def plan_text(plan: Plan, weights: WeightForm | None = None) -> str:
    """A plan as JSON. weights: the form that they are to be converted to, if that was chosen."""
    own = {} if weights is None else {_WEIGHTS: asdict(weights)}
    return json.dumps({"qoff_plan": _VERSION, **own, **plan_values(plan)}, indent=1)


def plan_values(plan: Plan) -> dict[str, Any]:
    """The fields of a plan, as JSON has them."""
    values = asdict(plan)
    values["device_memory"], values["host_memory"] = plan.device_memory, plan.host_memory
    values["kv"]["layers"] = {str(layer): bits for layer, bits in plan.kv.layers.items()}
    folder = plan.spill_folder
    values["spill_folder"] = None if folder is None else str(folder)
    return values


def read_weights(path: str | os.PathLike[str]) -> WeightForm:
    """The form of weights that a plan was made for. Raises FormatError where it names none."""
    where = Path(path)
    weights = _values(where).get(_WEIGHTS)
    if weights is None:
        raise FormatError(f"{where}: chooses no bits of weights; qoff plan --max-kl --save does")
    try:
        found = WeightForm(**_part(weights))
        QuantConfig(found.bits, found.group_size, found.solver)
        target = found.target_bits
        if target is not None and not (is_number(target) and target > 0):
            raise ArgumentError(f"target_bits is {shown(target)}; expected a number above 0")
        return found
    except (ArgumentError, QuantizationError, TypeError) as error:
        raise FormatError(f"{where}: {error}; correct the file") from error


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """A plan from a file of `plan_text`. Raises FormatError naming file and field."""
    where = Path(path)
    values = _values(where)
    values.pop(_WEIGHTS, None)
    unknown = values.keys() - {field.name for field in fields(Plan)}
    if unknown:
        raise FormatError(f"{where}: a plan has no {min(unknown)!r}; correct the file")
    try:
        kv, placement = _part(values.pop("kv", {})), _part(values.pop("kv_placement", {}))
        layers = {int(k): (int(a), int(b)) for k, (a, b) in _part(kv.pop("layers", {})).items()}
        if values.get("spill_folder") is not None:
            values["spill_folder"] = Path(values["spill_folder"])
        return Plan(
            kv=KVQuant(**kv, layers=layers), kv_placement=KVPlacement(**placement), **values
        )
    except (ArgumentError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: {error}; correct the file") from error


def _values(where: Path) -> dict[str, Any]:
    values = read_object(where, "write it again with qoff plan --save")
    if values.pop("qoff_plan", None) != _VERSION:
        raise FormatError(f"{where}: is not a plan; qoff plan --save writes one")
    return values


def _part(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentError(f"found {shown(value)}; expected an object")
    return dict(value)
