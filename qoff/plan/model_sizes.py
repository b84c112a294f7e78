"""What plans know of any model that runs, whoever computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qoff.checkpoint import Checkpoint
from qoff.models.modules.configs import is_native
from qoff.quant import QuantConfig

from .module_sizes import ModuleSizes
from .native_sizes import NativeSizes
from .sizes import Sizes


def planned_sizes(config: Mapping[str, Any], quant: QuantConfig | None = None) -> Sizes:
    """Of the checkpoint that a model of floats is converted to; config: that of Hugging Face.

    Raises UnsupportedModelError for an architecture that nothing runs, for a model with code of its
    own, and for weights whose codes are taken over, whose formats only their files tell.
    """
    return NativeSizes.of(config, quant) if is_native(config) else ModuleSizes.of(config, quant)


def known_sizes(checkpoint: Checkpoint, trust_remote_code: bool = False) -> Sizes:
    """Of a checkpoint that is there. trust_remote_code: run code that came with the model."""
    if is_native(checkpoint.config):
        return NativeSizes.of_checkpoint(checkpoint)
    return ModuleSizes(checkpoint, stored=True, trust_remote_code=trust_remote_code)
