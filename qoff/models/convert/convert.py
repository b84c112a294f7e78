"""Converting a model to a qoff checkpoint, a layer at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from qoff.checkpoint import CheckpointWriter, check_apart
from qoff.errors import FormatError, QoffError, QuantizationError, UnsupportedModelError
from qoff.models.modules.configs import is_native
from qoff.models.sources import (
    GGUFModulesSource,
    ModulesSource,
    QuantizedSource,
    SafetensorsSource,
    Source,
    open_source,
    own_code,
)
from qoff.quant import Format, QTensor, QuantConfig
from qoff.quant.gguf_blocks import GROUP_SIZE
from qoff.quant.matrix import CALIBRATED
from qoff.system_memory import refusals, refused_tier

from .builder import Builder, with_uniform_experts
from .calibration import Calibration
from .loss import LossProbe
from .modules import ModulesJob
from .unconverted import Unconverted, leave_out_mtp

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # units done, units in all: the layers and the outer file


@refusals()
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
    probe: LossProbe | None = None,
) -> Path:
    """Convert a model to a checkpoint directory `out`, which is returned.

    source_path: a directory with safetensors, or a GGUF file, or one of its parts. quant: how float
    weights are quantized. for_cpu: store the packing that the CPU kernels read. Quantized weights
    keep their codes, those of a fused weight in the widest format of its parts; requantize:
    quantize the values of others again. For transformers' modules those of a GGUF file become 8-bit
    codes, or with requantize those that `quant` says. overwrite: replace a checkpoint at `out`.
    progress: called with units done and units in all. calibration: token ids, int64 [texts,
    tokens], for solver "gptq" only; not read where all codes are taken over, or the others get 8
    bits of values that were quantized before.
    probe: measures what is lost, for one layer more in float32 and some seconds.
    trust_remote_code: run code that comes with the model or its tokenizer, and keep it with the
    checkpoint.

    Memory holds one layer, or the outer weights, as written; for calibration see
    `calibration.Calibration`. An architecture without a spec is converted for transformers' own
    modules, with one layer, or the outer weights, in float32 in memory.

    Raises UnsupportedModelError, FormatError or QuantizationError naming file and tensor, and
    ConversionError when writing fails; then nothing is left at `out`.
    """
    check_apart(Path(out), source_path)
    with reading(source_path):
        source = open_source(source_path)
        quant = quant or QuantConfig()
        if for_cpu:
            quant = replace(quant, packing="rows16")
        _check_calibration(quant, calibration)
        config = source.config()
        job: _NativeJob | ModulesJob
        by_modules = modules_source(source)
        if by_modules is not None:
            if isinstance(source, GGUFModulesSource) and source.quantized and not requantize:
                quant, calibration = _kept(source, quant), None
            trust = trust_remote_code
            job = ModulesJob(by_modules, config, quant, trust, calibration, probe)
        else:
            assert not isinstance(source, GGUFModulesSource)
            job = _NativeJob(source, quant, requantize, calibration, probe)
        files = {**source.files(), **(own_code(source_path) if trust_remote_code else {})}
        with CheckpointWriter(out, overwrite=overwrite, expected_bytes=job.expected) as writer:
            for i in range(job.units):
                built = job.build(i)
                if i + 1 < job.units:
                    writer.write_layer(i, built)
                else:
                    writer.write_outer(built)
                del built
                if progress is not None:
                    progress(i + 1, job.units)
            if isinstance(job, _NativeJob) and job.has_mtp:
                writer.write_mtp(job.build_mtp())
            for name, data in files.items():
                writer.copy_file(name, data)
            writer.finish(job.config())
        return Path(out)


@contextmanager
def reading(source: str | os.PathLike[str]) -> Iterator[None]:
    """Name the source where it cannot be read; what is written names itself."""
    try:
        yield
    except QoffError:
        raise
    except OSError as error:
        if refused_tier(error) is not None:
            raise
        raise FormatError(f"{source}: cannot be read ({error}); fetch the model again") from error


class _NativeJob:
    """A conversion for the native decoder.

    units: files of weights, of the layers and the last one of what is outside of them. has_mtp:
    whether there is a layer for multi-token prediction, too. expected: about the bytes of all.
    """

    def __init__(
        self,
        source: Source,
        quant: QuantConfig,
        requantize: bool,
        calibration: Tensor | None,
        probe: LossProbe | None,
    ) -> None:
        self._model, self._builder = Unconverted.of(source), Builder(source, quant, requantize)
        self._model.check_patterns(quant.weights)
        self.units = len(self._model.units)
        self.expected = sum(self._builder.check(*unit) for unit in self._model.units)
        self.has_mtp = False
        if self._model.mtp is not None:
            try:
                self.expected += self._builder.check(*self._model.mtp)
                self.has_mtp = True
            except (FormatError, QuantizationError) as error:
                leave_out_mtp(source, error)
        self._calibration = self._calibrated(calibration)
        self._probe = probe
        if probe is not None:
            probe.begin(self._model, self._builder)

    def _calibrated(self, ids: Tensor | None) -> Calibration | None:
        """What solves matrices on these texts; None, where nothing would be better for it."""
        builder = self._builder
        matrices = [
            (prefix, weight)
            for prefix, unit in self._model.units[:-1]
            for weight in unit
            if builder.calibrates(prefix, weight)
        ]
        if ids is None or not matrices:
            return None
        if any(builder.gains(prefix, weight) for prefix, weight in matrices):
            return Calibration(self._model, builder, ids)
        builder.quant = replace(builder.quant, solver=builder.quant.data_free)
        logger.warning(
            "%s: converted without calibration, which would gain next to nothing: its weights are "
            "quantized already, and those whose codes are not kept get 8 bits",
            builder.source.path,
        )
        return None

    def build(self, unit: int) -> dict[str, QTensor | Tensor]:
        """Return the weights of a unit by their full names, in the order of its file."""
        prefix, weights = self._model.units[unit]
        if prefix and self._calibration is not None:
            built = self._calibration.layer(unit)
        else:
            each = {f"{prefix}{w.name}": self._builder.build(prefix, w) for w in weights}
            built = with_uniform_experts(each)
        if self._probe is not None and prefix:
            self._probe.layer(unit, built)
        elif self._probe is not None:
            self._probe.outer(built)
        return built

    def build_mtp(self) -> dict[str, QTensor | Tensor]:
        """Return the weights of its layer for multi-token prediction, without calibration."""
        assert self._model.mtp is not None
        prefix, weights = self._model.mtp
        return with_uniform_experts(
            {f"{prefix}{w.name}": self._builder.build(prefix, w) for w in weights}
        )

    def config(self) -> dict[str, Any]:
        """Return the `config.json` of the checkpoint, when all units were built."""
        return {**self._model.config, "quantization_config": self._builder.description()}


def modules_source(source: Source | GGUFModulesSource) -> ModulesSource | None:
    """A source that becomes a checkpoint for transformers' modules; None for the native decoder.

    Raises UnsupportedModelError for quantized weights that those are not read from.
    """
    if isinstance(source, GGUFModulesSource):
        return source
    if not isinstance(source, SafetensorsSource | QuantizedSource) or is_native(source.config()):
        return None
    if isinstance(source, QuantizedSource) and not source.as_floats:
        raise UnsupportedModelError(
            f"{source.path}: runs through transformers' modules, for which no quantized weights "
            "but 8-bit floats are read; convert the original model"
        )
    return source


def _kept(source: GGUFModulesSource, quant: QuantConfig) -> QuantConfig:
    """What weights that are quantized already become: 8-bit codes, without calibration.

    Raises QuantizationError for a format that was chosen by name and loses more.
    """
    own = Format(8, GROUP_SIZE)
    for pattern, form in quant.weights.items():
        if not form.holds(own):
            raise QuantizationError(
                f"{source.path}: its weights are quantized already and become {own}, which "
                f"{pattern!r} asks to store in {form}; leave that out, convert the model that it "
                "was made of, or pass requantize=True (--requantize)"
            )
    bits, group, solver = own.bits, own.group_size, quant.data_free
    return replace(quant, bits=bits, head_bits=bits, group_size=group, solver=solver)


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
