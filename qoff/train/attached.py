"""`qoff.train.attach`: a Trainer of transformers, or TRL's SFTTrainer, trains by streaming.

The Trainer keeps its loop: data, schedule of the rate, logs, callbacks, evaluation, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qoff.errors import ArgumentError

from .checkpoints import exists
from .exports import replacing, save_tokenizer
from .offload import offload
from .optimizers import SGD, AdamW, Optimizer, checked
from .training import Training

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback  # which takes seconds

_STATES = "qoff"  # folder in a checkpoint of the Trainer
_ADAMW = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit")
_ADAMW_8BIT = ("adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")


def attach(
    trainer: Trainer,
    *,
    tokens: int,
    optimizer: Optimizer | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: str | PathLike[str] | None = None,
    activation_memory: int | str = 0,
    activation_disk: int | str = 0,
    gradients: str = "auto",
    device: torch.device | str = "cpu",
) -> Training:
    """Have a Trainer train its model by `offload`; returns what does so. Then call its `train`.

    Micro-batches are those of its gradient accumulation, all at each layer, of up to `tokens`
    tokens each. Rate, betas, eps and clipping are those of its arguments, whose `optim` is an AdamW
    or SGD; optimizer: another, whose rate the Trainer's schedule replaces. The other options are
    those of `offload`. Its checkpoints have a folder "qoff", from which it goes on bit for bit.

    Raises ArgumentError for what would not be trained as the Trainer does: losses of its own, mixed
    precision, weight decay without an optimizer (a Trainer leaves out biases and norms).
    """
    args: Any = trainer.args
    _check(trainer)
    follower = _Follower(args.learning_rate)
    training = offload(
        trainer.model,  # type: ignore[arg-type]
        _of_arguments(args, follower) if optimizer is None else _following(optimizer, follower),
        tokens=tokens,
        micro_batches=args.gradient_accumulation_steps,
        device_memory=device_memory,
        host_memory=host_memory,
        disk=disk,
        max_norm=args.max_grad_norm or None,
        activation_memory=activation_memory,
        activation_disk=activation_disk,
        gradients=gradients,
        device=device,
    )
    args.gradient_checkpointing = False  # layers are computed again in any case
    disable = getattr(trainer.model, "activation_checkpointing_disable", None)
    if disable is not None:
        disable()
    trainer.optimizer = follower
    _Steps(trainer, training)
    return training


class _Follower(torch.optim.Optimizer):
    """An optimizer without weights, whose rate the Trainer's schedule sets."""

    def __init__(self, lr: float) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(()))], {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: `Training.step` has done it."""

    def rate(self, _: int) -> float:
        """Of a step."""
        return float(self.param_groups[0]["lr"])


class _Steps:
    """What takes the places of methods of a Trainer."""

    def __init__(self, trainer: Any, training: Training) -> None:
        self._trainer, self._training = trainer, training
        self._batches: list[Mapping[str, Tensor]] = []
        self._save_others = trainer._save_optimizer_and_scheduler
        self._load_others = trainer._load_optimizer_and_scheduler
        trainer.training_step = self.training_step
        trainer._clip_grad_norm = trainer._get_grad_norm = self.grad_norm
        trainer._save, trainer._save_optimizer_and_scheduler = self.save, self.save_states
        trainer._load_from_checkpoint = self.load
        trainer._load_optimizer_and_scheduler = self.load_states
        trainer.add_callback(_beginning(self._batches.clear))  # of what was interrupted

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep a micro-batch, and train on all of a step with the last; the loss, or 0 before."""
        if not self._batches:
            self._training.model.train()  # evaluations leave it in their mode
        batch = self._trainer._prepare_inputs(inputs)
        self._batches.append({k: x for k, x in batch.items() if x is not None})
        if not self._trainer.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self._trainer.args.device)
        batches = self._batches.copy()
        self._batches.clear()
        return torch.tensor(self._training.step(batches), device=self._trainer.args.device)

    def grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        """Of all gradients, where they are clipped."""
        return self._training.grad_norm

    def save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The model or its adapters, as the Trainer has them."""
        trainer, folder = self._trainer, Path(output_dir or self._trainer.args.output_dir)
        if hasattr(self._training.model, "peft_config"):
            self._training.save_adapter(folder)
        else:
            self._training.save_model(folder)
        with replacing(folder) as beside:
            if trainer.processing_class is not None:
                save_tokenizer(trainer.processing_class, beside)
            written = BytesIO()  # torch's own writing of files has other errors
            torch.save(trainer.args, written)
            (beside / "training_args.bin").write_bytes(written.getvalue())

    def save_states(self, output_dir: str) -> None:
        """The schedule's state, and all of the training."""
        self._save_others(output_dir)
        self._training.save(Path(output_dir) / _STATES)

    def load(self, *_: Any, **__: Any) -> None:
        """Weights come with the states."""

    def load_states(self, checkpoint: str | None) -> None:
        """Go on from a checkpoint. Raises ArgumentError for one that has no states of qoff."""
        if checkpoint is None:
            return
        states = Path(checkpoint) / _STATES
        if not exists(states):
            raise ArgumentError(
                f"{checkpoint} has no folder {_STATES!r}: it was saved with save_only_model, or "
                "without qoff; load its model and begin anew"
            )
        self._load_others(checkpoint)
        self._training.resume(states)


def _beginning(call: Callable[[], None]) -> TrainerCallback:
    """A callback that calls when a Trainer begins to train."""
    from transformers import TrainerCallback

    class Beginning(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            call()

    return Beginning()


def _of_arguments(args: Any, follower: _Follower) -> Optimizer:
    if args.weight_decay:
        raise ArgumentError(
            f"weight_decay={args.weight_decay}: a Trainer leaves biases and norms out of it; give "
            "attach an optimizer=qoff.train.AdamW(weight_decay=...), which does not, or set it to 0"
        )
    kind = str(getattr(args.optim, "value", args.optim))
    if kind == "sgd":
        return SGD(lr=follower.rate)
    if kind not in (*_ADAMW, *_ADAMW_8BIT):
        raise ArgumentError(
            f"optim={kind!r} is not known here; use {', '.join((*_ADAMW, *_ADAMW_8BIT))} or sgd, "
            "or give attach an optimizer="
        )
    betas, bits = (args.adam_beta1, args.adam_beta2), 8 if kind in _ADAMW_8BIT else 32
    eps = args.adam_epsilon
    return AdamW(lr=follower.rate, betas=betas, eps=eps, weight_decay=0.0, bits=bits)


def _following(optimizer: Optimizer, follower: _Follower) -> Optimizer:
    return replace(checked(optimizer), lr=follower.rate)


def _check(trainer: Any) -> None:
    from transformers import Trainer

    args, kind = trainer.args, type(trainer)
    own_loss = kind.compute_loss is not Trainer.compute_loss
    usual = kind.__name__ == "SFTTrainer" and getattr(args, "loss_type", "nll") in (None, "nll")
    for name, why in (
        ("bf16", "load the model in bfloat16 instead"),
        ("fp16", "load the model in float16 instead"),
        ("label_smoothing_factor", "the loss is the model's own"),
        ("load_best_model_at_end", "load it from its checkpoint instead"),
        ("torch_compile", "layers are computed one by one"),
        ("fsdp", "weights are on this machine's tiers"),
        ("deepspeed", "weights are on this machine's tiers"),
        ("optim_args", "give attach an optimizer="),
    ):
        if getattr(args, name, None):
            raise ArgumentError(f"{name}={getattr(args, name)!r} is not for streaming: {why}")
    if getattr(trainer, "aux_loss_enabled", False):  # of TRL
        raise ArgumentError(
            "router_aux_loss_coef: the loss of routers is not there in training by streaming; set "
            "it to 0.0"
        )
    if trainer.compute_loss_func is not None or (own_loss and not usual):
        raise ArgumentError(
            f"{kind.__name__} has a loss of its own; streaming trains the model's, on its labels"
        )
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ArgumentError("give the optimizer to attach, not to the Trainer, before it trains")
