"""Converting a model to a qoff checkpoint, a layer at a time.

A layer is held in memory as it will be written; its sources are read, quantized and dropped in
pieces of rows. Quantization goes row by row, so pieces and fusing change no value.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from qoff.checkpoint import CheckpointWriter
from qoff.errors import QuantizationError
from qoff.models.modules.configs import is_native
from qoff.models.sources import SafetensorsSource, open_source, own_code
from qoff.quant import QuantConfig
from qoff.quant.matrix import CALIBRATED

from .builder import Builder
from .calibrate import Calibration
from .modules import convert_modules
from .unconverted import Unconverted
from .uniform_experts import with_uniform_experts

Progress = Callable[[int, int], None]  # units done, units in all: the layers and the outer file


def convert(
    source_path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quant: QuantConfig | None = None,
    for_cpu: bool = False,
    requantize: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    calibration: Tensor | None = None,
) -> Path:
    """Convert a model to a checkpoint directory `out`, which is returned.

    source_path: a directory with safetensors, or a GGUF file. quant: how float weights are
    quantized. for_cpu: store the packing that the CPU kernels read. Quantized weights keep their
    codes, those of a fused weight in the widest format of its parts; requantize: quantize the
    values of others again. overwrite: replace a checkpoint at `out`. progress: called with units
    done and units in all. calibration: token ids, int64 [texts, tokens], for solver "gptq" only.
    trust_remote_code: run code that comes with the model or its tokenizer, and keep it with the
    checkpoint.

    Memory holds one layer, or the outer weights, as written; for calibration see
    `calibrate.Calibration`. An architecture without a spec is converted for transformers' own
    modules (`convert.modules`), with one layer, or the outer weights, in float32 in memory.

    Raises UnsupportedModelError, FormatError or QuantizationError naming file and tensor, and
    ConversionError when writing fails; then nothing is left at `out`.
    """
    source = open_source(source_path)
    resolved = _resolved(quant or QuantConfig(), for_cpu)
    _check_calibration(resolved, calibration)
    config = source.config()
    if isinstance(source, SafetensorsSource) and not is_native(config):
        if calibration is not None:
            raise QuantizationError(
                f"{source.path}: runs through transformers' modules, which cannot be calibrated; "
                "use hqq, mse or rtn"
            )
        if resolved.weights:
            raise QuantizationError(
                f"{source.path}: runs through transformers' modules, whose matrices all have one "
                "format; leave `weights` out"
            )
        return convert_modules(
            source,
            config,
            out,
            resolved,
            overwrite=overwrite,
            progress=progress,
            trust_remote_code=trust_remote_code,
        )
    model, builder = Unconverted.of(source), Builder(source, resolved, requantize)
    model.check_patterns(resolved.weights)
    expected = sum(builder.check(prefix, weights) for prefix, weights in model.units)
    files = source.files()
    solving = None if calibration is None else Calibration(model, builder, calibration)
    with CheckpointWriter(out, overwrite=overwrite, expected_bytes=expected) as writer:
        for i, (prefix, weights) in enumerate(model.units):
            if prefix and solving is not None:
                built = solving.layer(i)
            else:
                built = {f"{prefix}{w.name}": builder.build(prefix, w) for w in weights}
            built = with_uniform_experts(built)
            if prefix:
                writer.write_layer(i, built)
            else:
                writer.write_outer(built)
            del built
            if progress is not None:
                progress(i + 1, len(model.units))
        for name, data in files.items():
            writer.copy_file(name, data)
        if trust_remote_code:
            for name, code in own_code(source_path).items():
                writer.copy_file(name, code)
        writer.finish({**model.config, "quantization_config": builder.description()})
    return Path(out)


def _check_calibration(quant: QuantConfig, calibration: Tensor | None) -> None:
    if quant.solver in CALIBRATED and calibration is None:
        raise QuantizationError(
            f"solver {quant.solver!r} needs a text to calibrate on (--calibration FILE); "
            "hqq, mse and rtn do not"
        )
    if quant.solver not in CALIBRATED and calibration is not None:
        raise QuantizationError(
            f"solver {quant.solver!r} takes no calibration; use gptq, or leave it out"
        )


def _resolved(quant: QuantConfig, for_cpu: bool) -> QuantConfig:
    return replace(quant, packing="rows16") if for_cpu else quant
