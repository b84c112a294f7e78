"""A model that is to be converted: what it consists of, and where that is read from."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from qoff.errors import QuantizationError, UnsupportedModelError
from qoff.log import say_once
from qoff.models.families import converted
from qoff.models.families.experts import as_shaped, as_stored
from qoff.models.families.family import TensorNames
from qoff.models.families.mtp import mtp_config, mtp_names
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.names import MTP_PREFIX, Weight, layer_prefix
from qoff.models.row_order import ROW_BLOCK
from qoff.models.sources import (
    GGUFModulesSource,
    QuantizedSource,
    SafetensorsSource,
    Source,
)
from qoff.models.spec import DecoderSpec
from qoff.models.stored import check_counts
from qoff.quant import QTensor
from qoff.units import counted

from .builder import PIECE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unconverted:
    """A model of a family that the native decoder runs.

    units: the weights of each layer file and of the outer file, with what their names start with.
    mtp: the same of a layer for multi-token prediction, if there is one that qoff uses.
    """

    source: Source
    config: dict[str, Any]
    spec: DecoderSpec
    units: tuple[tuple[str, tuple[Weight, ...]], ...]
    mtp: tuple[str, tuple[Weight, ...]] | None = None

    @classmethod
    def of(cls, source: Source | GGUFModulesSource) -> Unconverted:
        """Read configuration and headers. Raises UnsupportedModelError or FormatError."""
        if isinstance(source, GGUFModulesSource):
            raise UnsupportedModelError(
                f"{source.path}: runs through transformers' modules, whose matrices all have one "
                "format"
            )
        config, names = converted(source.config(), lambda name: source.info(name) is not None)
        names = source.tensor_names or names
        spec = DecoderSpec.from_config(config)
        shape_of = partial(_shape_of, source)
        check_counts(spec, names, shape_of, source.path)
        if spec.experts is not None and any(spec.experts.layers):
            sizes = spec.expert_width, spec.experts.intermediate_size
            names = as_shaped(names, spec.experts.layers.index(True), sizes, shape_of)
        if spec.tie_word_embeddings and _has_other_head(source, spec, names):
            spec = replace(spec, tie_word_embeddings=False)
        if isinstance(source, SafetensorsSource | QuantizedSource):
            tell_of_unused(source, spec.num_layers, _by_layer(source.names(), names))
        config = {**config, "tie_word_embeddings": spec.tie_word_embeddings}
        layers = ((layer_prefix(i), layer_weights(spec, i, names)) for i in range(spec.num_layers))
        units = (*layers, ("", outer_weights(spec, names)))
        return cls(source, config, spec, units, _mtp(source, config, spec, names))

    def check_patterns(self, patterns: Mapping[str, object]) -> None:
        """Raise QuantizationError for a pattern that is that of no matrix's name."""
        units = (*self.units, *([] if self.mtp is None else [self.mtp]))
        names = [prefix + w.name for prefix, unit in units for w in unit if w.columns is not None]
        check_patterns(self.source.path, names, patterns)


def check_patterns(path: object, names: Sequence[str], patterns: Iterable[str]) -> None:
    """Raise QuantizationError for a pattern that is that of no matrix in a model at `path`."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise QuantizationError(
                f"{path}: no matrix is called {pattern!r}; names are like "
                f"{names[0]!r} and {names[-1]!r}, and * stands for any part of one"
            )


def _mtp(
    source: Source, config: Mapping[str, Any], spec: DecoderSpec, names: TensorNames
) -> tuple[str, tuple[Weight, ...]] | None:
    """A layer for multi-token prediction; None without one, and where it is unlike the others."""
    called = mtp_names(names, spec.num_layers, lambda name: source.info(name) is not None)
    if called is None:
        return None
    try:
        own = DecoderSpec.from_config(mtp_config(config))
    except UnsupportedModelError as error:
        leave_out_mtp(source, error)
        return None
    called = as_stored(called, lambda name: source.info(name) is not None)
    return MTP_PREFIX, layer_weights(own, 0, called)


def leave_out_mtp(source: Source, error: Exception) -> None:
    """Say that the layer for multi-token prediction is not used: the model is one without it."""
    say_once(
        logger,
        f"{source.path}: its layer for multi-token prediction is left out, as it is unlike the "
        f"model's others: {error}",
    )


def tell_of_unused(
    source: SafetensorsSource | QuantizedSource, count: int, layers: Mapping[int, Sequence[str]]
) -> None:
    """Warn, once, where there are more layers than the `count` of config.json.

    layers: names of tensors by layer. Those that predict tokens further ahead are not missed.
    """
    config = source.config()
    text = config.get("text_config")
    ahead = (text if isinstance(text, dict) else config).get("num_nextn_predict_layers")
    first = count + (ahead if isinstance(ahead, int) else 0)
    beyond = {layer: names for layer, names in layers.items() if layer >= first}
    unused = [i for i, names in beyond.items() if not any(".eh_proj." in x for x in names)]
    if unused:
        least = min(unused)
        say_once(
            logger,
            f"{source.path}: {beyond[least][0]} and all else of layers from {least} on is "
            f"not used, as config.json says that it has {counted(count, 'layer')}",
        )


def _by_layer(names: Iterable[str], called: TensorNames) -> dict[int, list[str]]:
    """Names of tensors by the layer that they are of."""
    before, after = map(re.escape, called.layer.split("{}"))
    layer, found = re.compile(f"{before}([0-9]+){after}"), dict[int, list[str]]()
    for name in names:
        if (match := layer.match(name)) is not None:
            found.setdefault(int(match[1]), []).append(name)
    return found


def _shape_of(source: Source, name: str) -> tuple[int, ...] | None:
    info = source.info(name)
    return None if info is None else info.shape


def _has_other_head(source: Source, spec: DecoderSpec, names: TensorNames) -> bool:
    """Whether a head is there that differs from the embedding it is declared to be tied to.

    transformers does not tie the two then.
    """
    embedding, head = names.embedding, names.head
    if source.info(head) is None or source.info(embedding) is None:
        return False
    if source.info(head) != source.info(embedding):
        return True
    rows = max(ROW_BLOCK, PIECE // spec.hidden_size // ROW_BLOCK * ROW_BLOCK)
    values = (
        (x.dequantize() if isinstance(x, QTensor) else x for x in source.chunks(name, rows))
        for name in (embedding, head)
    )
    return not all(torch.equal(a, b) for a, b in zip(*values, strict=True))
