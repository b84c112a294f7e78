"""Making transformers know qoff, as soon as both are imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HOME = "transformers.quantizers.auto"  # where transformers keeps its table of quantizers
METHOD = "qoff"


class _WhenImported:
    """Registers qoff at the end of the import of `transformers.quantizers.auto`.

    A finder of `sys.meta_path`; importing its base class would take longer than all of qoff.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _HOME:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_with_transformers() -> None:
    """Register `QoffConfig` and the quantizer: now if transformers is loaded so far, else then."""
    home = sys.modules.get(_HOME)
    if home is not None:
        _register(home)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _register(home: ModuleType) -> None:
    if METHOD in home.AUTO_QUANTIZER_MAPPING:
        return
    from .config import QoffConfig
    from .quantizer import QoffHfQuantizer

    home.register_quantization_config(METHOD)(QoffConfig)
    home.register_quantizer(METHOD)(QoffHfQuantizer)
    inner = import_module("transformers.integrations.accelerate").check_and_set_device_map

    @wraps(inner)
    def with_disk(device_map: object) -> object:
        """Take "disk" as {"": "disk"}, which means the same and is refused as a device."""
        return inner({"": device_map} if device_map == "disk" else device_map)

    for name in ("transformers.integrations.accelerate", "transformers.modeling_utils"):
        vars(sys.modules.get(name, home)).update(check_and_set_device_map=with_disk)
