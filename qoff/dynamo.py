"""Running without torch's compiler, whose import takes 90 MB and seconds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar
from unittest.mock import patch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """`torch.compiler.disable`, which imports torch's compiler, as soon as that is imported."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **options)
        return _disabled(function)(*arguments, **options)

    return call  # type: ignore[return-value]  # called like it


@functools.cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


def import_configurations() -> None:
    """Import transformers' classes of configurations, but not torch's compiler with them.

    All of them import a function of transformers' continuous batching that is decorated with
    `torch.compiler.disable`. It becomes `uncompiled`.
    """
    import torch

    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        return uncompiled if function is None else uncompiled(function)

    with patch.object(torch.compiler, "disable", disable):
        import_module("transformers.models.llama.configuration_llama")
