"""The qoff checkpoint for a path or a hub id, converted if there is none."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from qoff.budgets import CPU, device_guard
from qoff.errors import ArgumentError, ConversionError, FormatError, UnsupportedModelError
from qoff.models.convert.convert import convert, modules_source, reading
from qoff.models.convert.unconverted import Unconverted
from qoff.models.modules.configs import check_config
from qoff.models.sources import open_source
from qoff.quant import QuantConfig
from qoff.schema import read_object
from qoff.settings import cache_directory

from .device import check_packing
from .hub import download, download_config, exists, is_own
from .stamps import digest, source_stamps

logger = logging.getLogger(__name__)


class QuantizedError(ArgumentError):
    """Weights are to be quantized that are quantized already."""


def find_checkpoint(
    path_or_hub_id: str | PathLike[str],
    *,
    quant: QuantConfig | None = None,
    cache_dir: str | PathLike[str] | None = None,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    device: torch.device = CPU,
    for_cpu: bool | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Return the qoff checkpoint for a path or hub id, converting into the cache if there is none.

    A conversion is found again by its source (the path, sizes and times of its files, or the hub
    id and commit, whose weights need not be there any more), by `quant` and by `for_cpu`, whether
    it is in the CPU's packing (None: where that is the device). A GPU that is the device converts.
    Arguments and errors are those of `load`.
    """
    chosen = quant or QuantConfig()
    folder = Path(cache_dir) if cache_dir is not None else cache_directory()
    for_cpu = device.type == "cpu" if for_cpu is None else for_cpu
    suffix, other = ("", "-any") if for_cpu else ("-any", "")
    if exists(path_or_hub_id):
        path = _model(Path(path_or_hub_id))
        if is_checkpoint(path):
            _refuse_quant(path, quant)
            check_packing(path, read_if_there(path / "config.json"), device)
            return path
        name = path.stem if path.is_file() else path.resolve().name
        target = folder / f"{name}-{digest(source_stamps(path), chosen)}"
        source = partial(Path, path)
    else:
        hub_id = str(path_or_hub_id)
        config = download_config(hub_id, revision, trust_remote_code)
        if is_checkpoint(config.parent):
            _refuse_quant(hub_id, quant)
            check_packing(hub_id, read_if_there(config), device)
            return download(hub_id, revision, trust_remote_code)
        commit = config.parent.name  # of the hub's own cache
        target = folder / f"{hub_id.replace('/', '--')}-{digest([commit], chosen)}"
        source = partial(download, hub_id, revision, trust_remote_code)
    target, twin = (target.with_name(target.name + end) for end in (suffix, other))
    if not is_checkpoint(target):
        if is_checkpoint(twin):
            logger.warning(
                "%s: is converted for a %s in %s, and now for a %s, too",
                path_or_hub_id,
                *(("GPU", twin, "CPU") if for_cpu else ("CPU", twin, "GPU")),
            )
        try:
            with device_guard(device):
                convert(
                    source(),
                    target,
                    quant=chosen,
                    for_cpu=for_cpu,
                    progress=progress,
                    trust_remote_code=trust_remote_code,
                )
        except ConversionError as error:
            if not is_checkpoint(target):  # it is one when another process was faster
                if str(error).startswith(f"{target}: ") and isinstance(error.__cause__, OSError):
                    raise ConversionError(
                        f"{error}: QOFF_CACHE or cache_dir (--cache-dir) names another folder"
                    ) from error
                raise
    return target


def check_source(
    path_or_hub_id: str | PathLike[str],
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Raise what `find_checkpoint` would of what is no model, before anything is made for it.

    Reads headers only, and of a model on the hub config.json.
    """
    if not exists(path_or_hub_id):
        download_config(str(path_or_hub_id), revision, trust_remote_code)
    elif not is_checkpoint(path := _model(Path(path_or_hub_id))):
        with reading(path):
            source = open_source(path)
            if modules_source(source) is None:
                Unconverted.of(source)
            else:
                check_config(source.config(), trust_remote_code)


def _model(path: Path) -> Path:
    """The path; raises UnsupportedModelError where it has adapters alone.

    And ArgumentError for one that is not UTF-8, which tokenizers cannot be read from.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{os.fsencode(path)!r}: the path is not UTF-8, and libraries that read models and "
            "tokenizers open no other; rename it, or give a link to it"
        ) from error
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UnsupportedModelError(
            f"{path}: is an adapter, without the model that it was trained beside; give that, and "
            "the adapter by --lora-modules NAME=FOLDER, or qoff.LLM(..., adapters={NAME: FOLDER})"
        )
    return path


def _refuse_quant(name: object, quant: QuantConfig | None) -> None:
    if quant is not None:
        raise QuantizedError(
            f"{name}: is a qoff checkpoint, whose weights are quantized already; leave quant out, "
            "or give the model that it was converted from"
        )


def local_source(path_or_hub_id: str | PathLike[str], trust_remote_code: bool = False) -> Path:
    """Return the path itself where it exists, else the files of that model on the hub, downloaded.

    Raises QoffError when there is neither, UnsupportedModelError before weights are downloaded, and
    for an adapter.
    """
    if exists(path_or_hub_id):
        return _model(Path(path_or_hub_id))
    download_config(str(path_or_hub_id), None, trust_remote_code)
    return download(str(path_or_hub_id), None, trust_remote_code)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory says of itself that it is a qoff checkpoint."""
    return is_own(read_if_there(path / "config.json").get("quantization_config"))


def read_if_there(path: Path) -> dict[str, Any]:
    """A file of JSON; nothing where it is not readable."""
    try:
        return read_object(path)
    except FormatError:
        return {}
