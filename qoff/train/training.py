"""A model in training, as its user has it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from qoff.errors import ArgumentError, TrainingError
from qoff.hf.packed.module import CodesModule

from .batches import IGNORED, Limits
from .checkpoints import Progress, kind_of_run, opened, restore, save
from .exports import replacing, save_model
from .heap import reused
from .homes import Homes
from .layout import PIECE
from .loss_scale import LossScale, uses_float16
from .needs import kept_as
from .optimizers import Optimizer
from .placement import Placement
from .step import Batch, Engine


@dataclass(frozen=True)
class TrainingStats:
    """What a training has done. moved: bytes to and from disk, like "weights read"."""

    moved: dict[str, int]
    frozen_read: int  # bytes of packed weights that were read, since the model was loaded
    wait_s: float  # that steps waited for weights
    device_peak: int  # bytes of the device arena in use
    host_peak: int
    activations_planned: int  # bytes that were to be kept in the last step
    activations_peak: int


class Training:
    """Trains `model` step by step; see `offload`. Use it from one thread.

    steps: done so far. grad_norm: of the last step, where gradients are clipped or float16.
    loss_scale: where weights are float16. skipped: steps whose gradients overflowed.
    """

    def __init__(
        self,
        model: Any,
        engine: Engine,
        optimizer: Optimizer,
        homes: Homes,
        placement: Placement,
        max_norm: float | None,
        micro_batches: int,
        limits: Limits,
        gaps: int | None = None,
    ) -> None:
        """gaps: bytes of memory that the C library keeps in a step, see `heap.reused`."""
        self.model, self.optimizer, self.placement = model, optimizer, placement
        self.steps = 0
        self.skipped = 0
        self.grad_norm: float | None = None
        self.loss_scale = LossScale() if uses_float16(model) else None
        self._engine, self._homes = engine, homes
        self._max_norm, self._micro_batches = max_norm, micro_batches
        self._limits, self._gaps = limits, gaps
        model.train()

    def step(self, batches: Sequence[Batch]) -> float:
        """Train on the micro-batches of one step; returns the mean loss of their tokens.

        batches: what the model's forward takes: `input_ids` [B, T], `attention_mask`, `labels`
        (without: the ids that are not masked). Where gradients in float16 overflow, the step is
        left out, `steps` stays, and the loss scale is halved. Raises ArgumentError for batches that
        are too large, TrainingError for a loss or another norm that is not finite, with weights as
        before the step; where updates are delayed, with that of the step before.
        """
        with reused(self._gaps):
            return self._step(batches)

    def _step(self, batches: Sequence[Batch]) -> float:
        self._check_whole()
        given = [self._limits.checked(batch) for batch in batches]
        counts = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in given]
        used = [(b, n) for b, n in zip(given, counts, strict=True) if n]
        if not used or len(given) > self._micro_batches:
            raise ArgumentError(
                f"{len(given)} micro-batches, {len(used)} of them with labels; a step takes 1 to "
                f"{self._micro_batches}"
            )
        total, scale = sum(counts), self.loss_scale
        loss, self.grad_norm = self._engine.step(
            [self._moved(b) for b, _ in used],
            [n / total for _, n in used],
            self.optimizer,
            self.steps,
            self._max_norm,
            1.0 if scale is None else scale.value,
        )
        norm = self.grad_norm
        if scale is not None and norm is not None:
            if not math.isfinite(norm):
                scale.overflows()
                self.skipped += 1
                return loss
            scale.fits()
        for what, value in (("loss", loss), ("norm of the gradients", norm)):
            if value is not None and not math.isfinite(value):
                late = self._engine.parts.steps.delayed is not None
                weights = (
                    "have the update of the step before" if late else "are as before this step"
                )
                raise TrainingError(
                    f"step {self.steps + 1}: the {what} is {value}; weights {weights}; "
                    "lower the learning rate, or look at what this step learns from"
                )
        self.steps += 1
        return loss

    def check(self, batches: Iterable[Batch]) -> None:
        """Raise ArgumentError for a micro-batch that `step` would not take."""
        for batch in batches:
            self._limits.checked(batch)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss of the tokens of batches as `step` takes, without dropout; learns nothing.

        Layers stream once for as many batches as a step takes. Logits are there in pieces, as in a
        step, from the first step on. Raises ArgumentError.
        """
        with reused(self._gaps):
            return self._evaluate(batches)

    def _evaluate(self, batches: Iterable[Batch]) -> float:
        self._check_whole()
        total, count = 0.0, 0
        self.model.eval()
        try:
            given = map(self._limits.checked, batches)
            while group := list(islice(given, self._micro_batches)):
                labels = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in group]
                used = [(b, n) for b, n in zip(group, labels, strict=True) if n]
                losses = self._engine.evaluate([self._moved(b) for b, _ in used]) if used else []
                total += sum(x * n for x, (_, n) in zip(losses, used, strict=True))
                count += sum(labels)
        finally:
            self.model.train()
        if not count:
            raise ArgumentError("there are no labels to evaluate")
        return total / count

    @property
    def stats(self) -> TrainingStats:
        """Counters since the start."""
        parts = self._engine.parts
        return TrainingStats(
            dict(self._homes.moved),
            parts.held.frozen.bytes_read,
            parts.held.weights.wait_s,
            self._homes.device.used,
            self._homes.host.used,
            parts.activations.planned,
            parts.activations.peak,
        )

    def kept_as(self, gradients: str) -> str:
        """What gradients of this model's layers are kept as where `offload` is told `gradients`."""
        parts = self._engine.parts
        units = (*parts.held.units[:-1], *(tile.unit for tile in parts.steps.tiles.tiles))
        return str(kept_as(gradients, units)).removeprefix("torch.")

    def is_finite(self) -> bool:
        """Whether all weights that learn are. Raises ArgumentError as `state_dict` does."""
        self._check_whole()
        found = True
        for i, unit, flat in self._engine.parts.held.each():
            in_tiles = (rows for _, rows in self._engine.parts.steps.tiles.each(i))
            found = found and all(map(_finite, chain(unit.views(flat).values(), in_tiles)))
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all weights that learn, by name.

        Raises ArgumentError after a step that has failed half-way.
        """
        self._check_whole()
        found: dict[str, Tensor] = {}
        for i, unit, flat in self._engine.parts.held.each():
            found |= {name: x.clone() for name, x in unit.views(flat).items()}
            found |= self._engine.parts.steps.tiles.of_layer(i)
        return found

    def save_adapter(self, folder: str | PathLike[str]) -> None:
        """Write the adapters of a PEFT model, as PEFT does. Raises ArgumentError for other models.

        They are copied to memory for that. What was there is replaced when all is written. Raises
        DiskWriteError.
        """
        if not hasattr(self.model, "peft_config"):
            raise ArgumentError(f"{type(self.model).__name__} is no PEFT model; use save_model")
        state = self.state_dict()
        with replacing(Path(folder)) as beside:
            self.model.save_pretrained(beside, state_dict=state)

    def save_model(self, folder: str | PathLike[str]) -> None:
        """Write all weights and the config, as transformers reads them; a layer at a time.

        What was there is replaced when all is written. Raises DiskWriteError, and ArgumentError for
        PEFT models and packed ones.
        """
        if hasattr(self.model, "peft_config"):
            raise ArgumentError(f"{type(self.model).__name__} is a PEFT model; use save_adapter")
        if any(isinstance(module, CodesModule) for module in self.model.modules()):
            raise ArgumentError(
                f"{type(self.model).__name__} has packed weights, which are in its checkpoint; "
                "state_dict() has what learned beside them"
            )
        self._check_whole()
        engine, model = self._engine, self.model
        units, tiles = engine.parts.held.units, engine.parts.steps.tiles
        learn = {name for unit in units for name in unit.parameters}
        learn |= {tile.name for tile in tiles.tiles}
        buffers = dict(model.named_buffers())
        others = {name: x for name, x in model.state_dict().items() if name in buffers}
        others |= {name: p.data for name, p in model.named_parameters() if name not in learn}
        parts = (
            unit.views(flat) | tiles.of_layer(i) | (others if unit is units[-1] else {})
            for i, unit, flat in engine.parts.held.each()
        )
        save_model(model, parts, len(units), Path(folder))

    def save(self, folder: str | PathLike[str], position: Any = None) -> None:
        """Write a checkpoint, in place of the one in this folder as soon as it is whole.

        It has weights, states, the number of steps and the state of torch's generator. position:
        of the caller in its data, of what JSON has. What is on disk is copied by the system, on
        file systems with shared blocks without writing it again. Raises DiskWriteError,
        ArgumentError after a step that has failed half-way.
        """
        self._check_whole()
        parts = self._engine.parts
        pending = None if parts.steps.delayed is None else parts.steps.delayed.pending
        random = parts.generators.state()
        now = Progress(self.steps, random, position, self.loss_scale, pending)
        run = self._kind_of_run()
        save(Path(folder), self._homes, parts.kept, run, now)

    def resume(self, folder: str | PathLike[str]) -> Any:
        """Go on from a checkpoint; returns the position that it was saved with.

        Model, kind of optimizer and tiles must be those of the run, and the kind of gradients where
        updates are delayed. The placement need not be, nor budgets that give the same tiles. Raises
        ArgumentError for a checkpoint of another run, FormatError for none, ChecksumError for one
        that is damaged, DiskReadError.
        """
        engine, parts, kept = self._engine, self._engine.parts, self._engine.parts.kept
        run = self._kind_of_run()
        with opened(Path(folder), kept, run) as (fd, now):
            engine.parts.steps.changing = True
            restore(fd, self._homes, kept)
            engine.parts.steps.changing = False
        if parts.steps.delayed is not None:
            parts.steps.delayed.pending = now.pending
        self.steps, self.grad_norm = now.steps, None
        if self.loss_scale is not None and now.loss_scale is not None:
            self.loss_scale = now.loss_scale
        parts.generators.restore(now.random)
        parts.held.outer.arrive()
        return now.position

    def _kind_of_run(self) -> dict[str, Any]:
        parts = self._engine.parts
        tiles = [tile.unit for tile in parts.steps.tiles.tiles]
        sums = [place.dtype for place in parts.steps.tiles.places]
        late, gradient = parts.steps.delayed is not None, parts.gradients.dtypes.kept
        return kind_of_run(parts.held.units, self.optimizer, late, tiles, gradient, sums)

    def _check_whole(self) -> None:
        if self._engine.parts.steps.changing:
            raise ArgumentError(
                "a step has failed half-way, so weights are of no one step; begin again from what "
                "was saved last"
            )

    def _moved(self, batch: Batch) -> Batch:
        """A batch where the model computes."""
        device = self._engine.parts.device
        return {k: x.to(device) if isinstance(x, Tensor) else x for k, x in batch.items()}


def _finite(x: Tensor) -> bool:
    """Whether all elements are; a piece at a time, as torch makes a copy."""
    return all(bool(part.isfinite().all()) for part in x.reshape(-1).split(PIECE))
