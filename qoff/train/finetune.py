"""A whole run of fine-tuning: a model, lines of JSON, checkpoints, a log, and what is saved."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qoff.checkpoint.place import entries
from qoff.errors import (
    ArgumentError,
    DiskWriteError,
    QoffError,
    TrainingError,
    UnsupportedModelError,
    io_errors,
    raised_as,
)
from qoff.hf.checkpoints import is_checkpoint
from qoff.hf.generation_config import read_generation_config

from . import checkpoints, logs
from .data import Sequences
from .exports import MODEL, replacing, save_tokenizer
from .logs import Told
from .needs import GRADIENTS
from .optimizers import Adafactor, AdamW, Lion, Optimizer
from .schedules import Schedule
from .training import Training

_CHECKPOINT, _LOG = "checkpoint", "log.csv"
_SEEN = "sequences_seen"  # learned from so far, beside what makes a run what it is
_UNNAMED = {"optimizer": "adamw", "delayed": False}
_MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")  # model types
OPTIMIZERS: Mapping[str, Callable[[Schedule], Optimizer]] = MappingProxyType(
    {
        "adamw": lambda rate: AdamW(lr=rate),
        "adamw-8bit": lambda rate: AdamW(lr=rate, bits=8),
        "adafactor": lambda rate: Adafactor(lr=rate),
        "lion": lambda rate: Lion(lr=rate),
    }
)


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
            pairs = [part.split("=") for part in text.split(",")]
            given = dict(pairs)
            if len(given) < len(pairs):
                raise ValueError
            r = int(given.pop("r"))
            alpha = float(given.pop("alpha", 2 * r))
            dropout = float(given.pop("dropout", 0))
            if given or r < 1 or not 0 < alpha < math.inf or not 0 <= dropout < 1:
                raise ValueError
        except (KeyError, ValueError):
            raise ArgumentError(
                f"--lora {text}: use r=16, or r=16,alpha=32,dropout=0.05, each once"
            ) from None
        return cls(r, alpha, dropout)


@dataclass(frozen=True)
class Recipe:
    """What makes a run what it is, beside its data. lora: None: all weights learn.

    decay_steps: after which the rate is 0; None: never. hold_out: share of sequences that are not
    learned. optimizer: one of OPTIMIZERS. delayed: weights change a step late. gradients: what
    those of layers are kept as. model_digest: of the weights beside adapters, `model_digest`.
    """

    model: str
    lora: Lora | None
    sequence: int
    micro_batches: int
    lr: float
    max_norm: float | None
    seed: int
    schedule: str = "constant"
    warmup: int = 0
    decay_steps: int | None = None
    hold_out: float = 0.0
    optimizer: str = "adamw"
    delayed: bool = False
    gradients: str = "auto"
    model_digest: str | None = None

    @property
    def rate(self) -> Schedule:
        """Of a step."""
        return Schedule(self.lr, self.schedule, self.warmup, self.decay_steps)


def check_model(path: Path, lora: Lora | None) -> None:
    """Raise ArgumentError for a qoff checkpoint in which nothing could learn."""
    if not is_checkpoint(path):
        return
    if lora is None:
        raise ArgumentError(
            f"{path} is a qoff checkpoint, whose packed weights do not learn; use --lora, or the "
            "model that it was made of"
        )


def loaded(path: Path, recipe: Recipe, dtype: str, places: Mapping[str, Any] | None = None) -> Any:
    """The model to train, with adapters if they learn; a qoff checkpoint streams from its files.

    places: other options of `from_pretrained`, for a qoff checkpoint those of `room`, dtype among
    them. Seeds torch's generator, from which adapters begin and dropout goes on.
    Raises ArgumentError as `check_model` does, UnsupportedModelError, FormatError for a
    generation_config.json that cannot be read and would be saved with the model.
    """
    from transformers import AutoModelForCausalLM

    lora = recipe.lora
    check_model(path, lora)
    # transformers goes on without one that it cannot read.
    generation = read_generation_config(path) if lora is None else None
    options: dict[str, Any] = {"dtype": dtype, **(places or {})}
    with raised_as(UnsupportedModelError, f"{path}: cannot be loaded by transformers"):
        model: Any = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **options)
    torch.manual_seed(recipe.seed)
    if generation is not None:
        model.generation_config = generation
    if lora is None:
        return model
    return adapted(model, lora)


def adapted(model: Any, lora: Lora) -> Any:
    """A model with adapters beside its linear layers. Raises QoffError without PEFT.

    UnsupportedModelError for a model that PEFT refuses.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise QoffError(
            f"adapters need {error.name}, which is not installed; pip install 'qoff[train]'"
        ) from error
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    # Linear layers that choose experts return a tuple; PEFT refuses those behind Mamba's states.
    excluded = [name for name, module in linear.items() if hasattr(module, "top_k")]
    if model.config.model_type in _MAMBA:
        excluded += [name for name in linear if name.endswith(".out_proj")]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number
        lora_dropout=lora.dropout,
        target_modules="all-linear",
        exclude_modules=excluded or None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # PEFT asks for what transformers has under another name.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        # It sets what GPT-2's linear layers ask for.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        # It gives experts a rank of their own, and looks for them among modules only.
        warnings.filterwarnings("ignore", ".*_pattern keys did not match", RuntimeWarning)
        # Packed ones have none.
        warnings.filterwarnings("ignore", ".*no parameter was matched", RuntimeWarning)
        with raised_as(UnsupportedModelError, "PEFT has no adapters for this model"):
            return get_peft_model(model, config)


def steps_of(data: Sequences, epochs: float, micro_batches: int) -> int:
    """How many steps go through the data so often."""
    return math.ceil(math.ceil(epochs * len(data.rows)) / micro_batches)


def has_run(out: Path) -> bool:
    """Whether a folder has a run that goes on."""
    return checkpoints.exists(out / _CHECKPOINT)


def check_place(out: Path, overwrite: bool) -> None:
    """Raise ArgumentError where a folder has other things than a run."""
    others = {p.name for p in entries(out)} if out.is_dir() else set()
    mine = has_run(out) or others <= {_LOG, _CHECKPOINT}
    if not overwrite and (not mine or out.is_file()):
        raise ArgumentError(f"{out} is there, and no run of qoff; choose another, or --overwrite")


def check_run(out: Path, recipe: Recipe, data: Sequences) -> None:
    """Raise ArgumentError where a folder has the checkpoint of another run.

    What gradients are kept as is known with the model. Raises FormatError for a damaged one.
    """
    folder = out / _CHECKPOINT
    if checkpoints.exists(folder):
        _check_same(folder, checkpoints.position(folder), _said(recipe, data))


def _said(recipe: Recipe, data: Sequences) -> dict[str, Any]:
    """What makes a run what it is, as JSON has it, but for gradients."""
    found = asdict(recipe)
    del found["gradients"]
    norm = "inf" if recipe.max_norm == math.inf else recipe.max_norm
    return {**found, "max_norm": norm, "data": data.digest}


def _check_same(folder: Path, position: Any, wanted: Mapping[str, Any]) -> None:
    unnamed = {**_UNNAMED, "model_digest": wanted["model_digest"]}  # of older runs
    theirs = {**unnamed, **(position if isinstance(position, dict) else {})}
    for name, value in wanted.items():
        if theirs.get(name) != value:
            raise ArgumentError(
                f"{folder} is of another run: its {name} is {theirs.get(name)}, here {value}; "
                "choose another --output, or begin anew with --overwrite"
            )


class Run:
    """Goes through the steps of a run that is new, or goes on from its checkpoint in `out`.

    saved: the step of the last checkpoint, if there is one. log: the CSV file of all steps.
    skipped: sequences that are left out, as the last step before ended its epochs without them.
    """

    def __init__(
        self,
        training: Training,
        data: Sequences,
        recipe: Recipe,
        out: Path,
        overwrite: bool,
        held_out: Sequences | None = None,
        board: Path | None = None,
    ) -> None:
        """held_out: is evaluated whenever a checkpoint has been written. board: for TensorBoard.

        Raises ArgumentError where `out` has the checkpoint of another run, and for tokens that the
        model does not have.
        """
        self._training, self._data, self._recipe, self._out = training, data, recipe, out
        for one in (data, held_out or Sequences([])):
            training.check(one.each())
        self._held_out = held_out
        self._same = {**_said(recipe, data), "gradients": training.kept_as(recipe.gradients)}
        self.checkpoint, self.log = out / _CHECKPOINT, out / _LOG
        self.saved: int | None = None
        self.skipped = 0
        if checkpoints.exists(self.checkpoint) and not overwrite:
            self._resume()
        with io_errors(out, DiskWriteError, "choose another --output"):
            out.mkdir(parents=True, exist_ok=True)
        logs.begin(self.log, self.steps)
        self._board = board

    @property
    def steps(self) -> int:
        """Done so far."""
        return self._training.steps

    def steps_of(self, epochs: float) -> int:
        """How many steps go through the data so often."""
        return steps_of(self._data, epochs, self._recipe.micro_batches)

    def go(
        self, steps: int | None, epochs: float, every: int, tell: Callable[[Told], None]
    ) -> None:
        """Train up to `steps` steps of the run, or so many epochs; save every so many steps.

        Raises TrainingError, which names the last checkpoint (that of the step before, where
        updates are not delayed), QoffError without TensorBoard.
        """
        recipe, training = self._recipe, self._training
        most = steps_of(self._data, epochs, 1) if steps is None else steps * recipe.micro_batches
        last = self.steps_of(epochs) if steps is None else steps
        with logs.opened(self.log, self._board, self.steps) as log:
            while training.steps < last:
                start, done = time.perf_counter(), training.steps
                batches = self._data.of_step(
                    training.steps, recipe.micro_batches, recipe.seed, most
                )
                try:
                    loss = training.step(batches)
                except TrainingError as error:
                    with suppress(QoffError):  # the error names what checkpoint there is
                        self._keep()
                    raise TrainingError(f"{error}; {self.where}") from error
                if training.steps == done:  # gradients overflowed: once more, with another scale
                    continue
                tokens = sum(batch["input_ids"].numel() for batch in batches)
                rate = tokens / (time.perf_counter() - start)
                lr = recipe.rate(training.steps - 1)
                told = Told(training.steps, loss, training.grad_norm, lr, rate)
                if training.steps % every == 0 or training.steps == last:
                    try:
                        self._save(min(most, training.steps * recipe.micro_batches))
                        told = replace(told, held_out_loss=self._evaluated())
                    except BaseException:  # a checkpoint may have this step, so the log has it
                        with suppress(DiskWriteError):  # the first error says why
                            log.add(told)
                        raise
                log.add(told)
                tell(told)

    def resumed(self, last: int) -> str:
        """How it goes on from its checkpoint up to step `last`, in words."""
        if self.steps >= last:
            return f"is at step {self.steps} already, and {last} are wanted: nothing is learned"
        said = f"goes on after step {self.steps}"
        if not self.skipped:
            return said
        return (
            f"{said}, which ended a run of fewer epochs with room for more sequences: the next "
            f"{self.skipped} of the data are left out"
        )

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
            with replacing(self._out, MODEL):  # which would be taken for the adapter's base
                pass
        else:
            training.save_model(self._out)
        with replacing(self._out) as beside:
            save_tokenizer(tokenizer, beside)

    def _keep(self) -> None:
        """Save the step before one that failed, which has left weights as they were."""
        if self.steps not in (0, self.saved) and not self._recipe.delayed:
            self._save(self.steps * self._recipe.micro_batches)

    def _save(self, sequences: int) -> None:
        """Write a checkpoint of a run that has learned from so many sequences.

        Raises TrainingError for weights that are not finite: the one before is to go on from.
        """
        if not self._training.is_finite():
            raise TrainingError(
                f"step {self.steps}: weights are not finite; lower the learning rate, or clip "
                f"gradients (--max-norm); {self.where}"
            )
        self._training.save(self.checkpoint, {**self._same, _SEEN: sequences})
        self.saved = self.steps

    def _evaluated(self) -> float | None:
        if self._held_out is None:
            return None
        return self._training.evaluate(self._held_out.each())

    def _resume(self) -> None:
        found = self._training.resume(self.checkpoint)
        theirs = found if isinstance(found, dict) else {}
        theirs = {"gradients": self._recipe.gradients, **theirs}
        if theirs["gradients"] in GRADIENTS:  # older runs have "auto"
            theirs["gradients"] = self._training.kept_as(theirs["gradients"])
        _check_same(self.checkpoint, theirs, self._same)
        self.saved = self._training.steps
        whole = self.saved * self._recipe.micro_batches
        self.skipped = whole - theirs.get(_SEEN, whole)
