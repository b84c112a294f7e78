"""A whole run of fine-tuning: a model, lines of JSON, checkpoints, a log, and what is saved."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError, QoffError, TrainingError, UnsupportedModelError, raised_as
from qoff.hf.load import is_checkpoint

from . import checkpoints
from .data import Sequences
from .training import Training

_CHECKPOINT, _LOG = "checkpoint", "log.csv"
_COLUMNS = ("step", "loss", "norm", "tokens_per_s")


@dataclass(frozen=True)
class Lora:
    """Adapters beside all linear layers. alpha: their factor is alpha / r."""

    r: int
    alpha: float
    dropout: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Of text like "r=16,alpha=32,dropout=0.05"; alpha is else 2 r. Raises ArgumentError."""
        try:
            given = dict(part.split("=") for part in text.split(","))
            r = int(given.pop("r"))
            alpha = float(given.pop("alpha", 2 * r))
            dropout = float(given.pop("dropout", 0))
            if given or r < 1 or not 0 < alpha < math.inf or not 0 <= dropout < 1:
                raise ValueError
        except (KeyError, ValueError):
            raise ArgumentError(f"--lora {text}: use r=16, or r=16,alpha=32,dropout=0.05") from None
        return cls(r, alpha, dropout)


@dataclass(frozen=True)
class Recipe:
    """What makes a run what it is, beside its data. lora: None: all weights learn."""

    model: str
    lora: Lora | None
    sequence: int
    micro_batches: int
    lr: float
    max_norm: float | None
    seed: int


@dataclass(frozen=True)
class Told:
    """What is known after a step. norm: of gradients, where they are clipped."""

    step: int
    loss: float
    norm: float | None
    tokens_per_s: float


def loaded(path: Path, recipe: Recipe, dtype: str) -> Any:
    """The model to train, with adapters if they learn; a qoff checkpoint streams from its files.

    Seeds torch's generator, from which adapters begin and dropout goes on.
    Raises ArgumentError for a qoff checkpoint without adapters, UnsupportedModelError.
    """
    from transformers import AutoModelForCausalLM

    own, lora = is_checkpoint(path), recipe.lora
    if own and lora is None:
        raise ArgumentError(
            f"{path} is a qoff checkpoint, whose packed weights do not learn; use --lora, or the "
            "model that it was made of"
        )
    options: dict[str, Any] = {"device_map": "disk"} if own else {"dtype": dtype}
    with raised_as(UnsupportedModelError, f"{path}: cannot be loaded by transformers"):
        model: Any = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **options)
    torch.manual_seed(recipe.seed)
    if lora is None:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise QoffError(
            f"adapters need {error.name}, which is not installed; pip install 'qoff[train]'"
        ) from error
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number
        lora_dropout=lora.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def check_place(out: Path, overwrite: bool) -> None:
    """Raise ArgumentError where a folder has other things than a run."""
    others = sorted(p.name for p in out.iterdir()) if out.is_dir() else []
    mine = checkpoints.exists(out / _CHECKPOINT) or set(others) <= {_LOG, _CHECKPOINT}
    if not overwrite and (not mine or out.is_file()):
        raise ArgumentError(f"{out} is there, and no run of qoff; choose another, or --overwrite")


class Run:
    """Goes through the steps of a run that is new, or goes on from its checkpoint in `out`.

    saved: the step of the last checkpoint, if there is one.
    """

    def __init__(
        self, training: Training, data: Sequences, recipe: Recipe, out: Path, overwrite: bool
    ) -> None:
        """Raises ArgumentError where `out` has the checkpoint of another run."""
        self._training, self._data, self._recipe, self._out = training, data, recipe, out
        self._same = {**asdict(recipe), "data": data.digest}
        self.checkpoint = out / _CHECKPOINT
        self.saved: int | None = None
        if checkpoints.exists(self.checkpoint) and not overwrite:
            self._resume()
        out.mkdir(parents=True, exist_ok=True)
        self._begin_log()

    @property
    def steps(self) -> int:
        """Done so far."""
        return self._training.steps

    def steps_of(self, epochs: float) -> int:
        """How many steps go through the data so often."""
        return math.ceil(self._sequences(epochs) / self._recipe.micro_batches)

    def go(
        self, steps: int | None, epochs: float, every: int, tell: Callable[[Told], None]
    ) -> None:
        """Train up to `steps` steps of the run, or so many epochs; save every so many steps.

        Raises TrainingError, which names the last checkpoint.
        """
        recipe, training = self._recipe, self._training
        most = self._sequences(epochs) if steps is None else steps * recipe.micro_batches
        last = self.steps_of(epochs) if steps is None else steps
        with (self._out / _LOG).open("a", newline="") as file:
            while training.steps < last:
                start = time.perf_counter()
                batches = self._data.of_step(
                    training.steps, recipe.micro_batches, recipe.seed, most
                )
                try:
                    loss = training.step(batches)
                except TrainingError as error:
                    raise TrainingError(f"{error}; {self.where}") from error
                tokens = sum(batch["input_ids"].numel() for batch in batches)
                rate = tokens / (time.perf_counter() - start)
                told = Told(training.steps, loss, training.grad_norm, rate)
                csv.writer(file).writerow(
                    [told.step, loss, "" if told.norm is None else told.norm, f"{rate:.1f}"]
                )
                file.flush()
                tell(told)
                if training.steps % every == 0 or training.steps == last:
                    training.save(self.checkpoint, self._same)
                    self.saved = training.steps

    @property
    def where(self) -> str:
        """The last checkpoint, in words."""
        if self.saved is None:
            return "there is no checkpoint yet"
        return f"the last checkpoint is {self.checkpoint}, of step {self.saved}"

    def export(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Save adapters as PEFT does, or the model as transformers does, with the tokenizer."""
        training = self._training
        if self._recipe.lora is not None:
            training.save_adapter(self._out)
        else:
            buffers = dict(training.model.named_buffers())
            kept = {n: x for n, x in training.model.state_dict().items() if n in buffers}
            state = {**kept, **training.state_dict()}
            training.model.save_pretrained(self._out, state_dict=state)
        tokenizer.save_pretrained(self._out)

    def _sequences(self, epochs: float) -> int:
        return math.ceil(epochs * len(self._data.rows))

    def _resume(self) -> None:
        found = self._training.resume(self.checkpoint)
        theirs = found if isinstance(found, dict) else {}
        for name, value in self._same.items():
            if theirs.get(name) != value:
                raise ArgumentError(
                    f"{self.checkpoint} is of another run: its {name} is {theirs.get(name)}, here "
                    f"{value}; choose another --output, or begin anew with --overwrite"
                )
        self.saved = self._training.steps

    def _begin_log(self) -> None:
        """Keep the rows of steps that are in the checkpoint."""
        path, rows = self._out / _LOG, list[list[str]]()
        if self.steps and path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.reader(file) if row and row[0].isdecimal()]
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            writer.writerows(row for row in rows if int(row[0]) <= self.steps)
