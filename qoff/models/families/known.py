"""The families whose checkpoints the native decoder runs, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import (
    corrected,
    experts,
    gemma,
    head_gates,
    hunyuan,
    kimi,
    latent,
    layer_norm,
    linear,
    ling,
    llama,
    mamba,
    mimo,
    short_conv,
)
from .family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **llama.FAMILIES,
        **gemma.FAMILIES,
        **layer_norm.FAMILIES,
        **experts.FAMILIES,
        **hunyuan.FAMILIES,
        **corrected.FAMILIES,
        **head_gates.FAMILIES,
        **mimo.FAMILIES,
        **latent.FAMILIES,
        **linear.FAMILIES,
        **kimi.FAMILIES,
        **ling.FAMILIES,
        **short_conv.FAMILIES,
        **mamba.FAMILIES,
    }
)
