"""Families of models: what a `config.json` says, and what their tensors are called."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qoff.errors import UnsupportedModelError, raised_as
from qoff.models.spec_parts import unsupported

from . import experts, renamed, with_vision
from .config_fields import as_transformers_5, check_fields
from .family import Family, Fields, Has, TensorNames, common_fields, full_config
from .known import FAMILIES

# What becomes one of these when it is converted.
SOURCES: Mapping[str, Family] = MappingProxyType({**with_vision.SOURCES, **renamed.SOURCES})


def read_spec(config: Mapping[str, Any]) -> Fields:
    """Return the fields of the DecoderSpec of a `config.json`.

    Raises UnsupportedModelError for a `model_type` not in FAMILIES, and for values that
    transformers' config class refuses.
    """
    family = _family(config.get("model_type"))
    check_fields(config)
    full = full_config(config)
    with raised_as(UnsupportedModelError, "config.json cannot be read", "correct it"):
        check_fields(vars(full))  # with transformers' defaults
        fields = {**common_fields(full), **family.fields(full)}
    if fields["rope"] is None and any(fields["rope_layers"]):
        kinds = sorted(full.rope_parameters)
        raise unsupported("rope_parameters", kinds, "one rope_type for all layers")
    return fields


def converted(config: Mapping[str, Any], has: Has) -> tuple[dict[str, Any], TensorNames]:
    """The config of the checkpoint that a model becomes, and what its tensors are called.

    has: whether it has a tensor. Raises UnsupportedModelError.
    """
    family = _family(config.get("model_type"), {**FAMILIES, **SOURCES})
    found, names = dict(as_transformers_5(config)), family.names
    if family.converted is not None:
        found, names = family.converted(found, has)
    return found, experts.as_stored(names, has)


def tensor_names(model_type: str) -> TensorNames:
    """What the tensors of a model are called where it comes from."""
    return _family(model_type).names


def module_names(model_type: str) -> tuple[TensorNames, ...]:
    """What adapters may call a model's modules: as its files do, or as transformers."""
    family = _family(model_type)
    return (family.names,) if family.modules is None else (family.names, family.modules)


def _family(model_type: object, known: Mapping[str, Family] = FAMILIES) -> Family:
    if str(model_type) not in known:
        raise unsupported("model_type", model_type, ", ".join((*FAMILIES, *SOURCES)))
    return known[str(model_type)]


__all__ = ["FAMILIES", "SOURCES", "converted", "module_names", "read_spec", "tensor_names"]
