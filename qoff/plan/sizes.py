"""What plans know of a model: the bytes of its weights, and what a token takes of each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, cached_property, partial

import torch

from qoff.checkpoint import Checkpoint, WeightFile
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.packing import BITS
from qoff.kernels.layout.states import StateShape
from qoff.memory.plan import HEAD, Layouts, is_expert, unit_weights
from qoff.models.spec_parts import ExpertsSpec

from .manual import Memory, Plan
from .profile import MachineProfile


class Sizes(ABC):
    """A model as a checkpoint has it, or would: where each weight lies in its file, and its bytes.

    checkpoint: without files where only the config is known; what plans placements reads headers
    alone, so it takes this as it takes a real one. stored: whether there are files. native: whether
    qoff computes the model itself; else transformers' modules do, which keep their hidden states
    on the device, draft nothing, and compute the experts of each pass by itself. one_by_one:
    whether experts may come so. alone: each sequence is computed by itself, in turns at each unit.
    whole_prompts: each is read in one pass.
    """

    checkpoint: Checkpoint
    stored: bool

    @property
    def native(self) -> bool:
        return True

    @property
    def one_by_one(self) -> bool:
        return True

    @property
    def alone(self) -> bool:
        return False

    @property
    def whole_prompts(self) -> bool:
        return False

    @property
    @abstractmethod
    def shapes(self) -> tuple[HeadShape, ...]:
        """The attention of each layer that attends, and whose K and V are packed."""

    @property
    @abstractmethod
    def readers(self) -> tuple[int, ...]:
        """How many layers read what each of `shapes` keeps."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Columns of what layers are given."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """Query heads of a layer."""

    @property
    def hidden_width(self) -> int:
        """Numbers of a token that layers hand on."""
        return self.hidden_size

    @property
    @abstractmethod
    def experts(self) -> ExpertsSpec | None:
        """The mixture, if there is one."""

    @property
    @abstractmethod
    def expert_width(self) -> int:
        """Columns of what experts are given."""

    @property
    @abstractmethod
    def layer_columns(self) -> int:
        """Multiplications of one token by the matrices of all layers, without chosen experts'."""

    @property
    @abstractmethod
    def last_columns(self) -> int:
        """The part of `layer_columns` in the last layer behind attention: for rows of logits."""

    @property
    @abstractmethod
    def expert_columns(self) -> int:
        """Multiplications of one row by the matrices of an expert in each layer that has any."""

    @property
    @abstractmethod
    def head_columns(self) -> int:
        """Multiplications of one row of logits."""

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Of recurrent layers whose kernels are qoff's."""

    @property
    @abstractmethod
    def position_limit(self) -> int | None:
        """Tokens that a sequence may have; None: as many as there is memory for."""

    @property
    @abstractmethod
    def index_top(self) -> int | None:
        """Tokens that an index chooses for attention; None: there is no index."""

    @abstractmethod
    def check_positions(self, tokens: int) -> None:
        """Raise ContextLengthError for sequences that are longer than the model's."""

    @abstractmethod
    def calls_s(self, machine: MachineProfile) -> float:
        """Seconds that a pass takes in calls, whatever they compute."""

    @abstractmethod
    def unpacked_bytes(self, tokens: int, on_gpu: bool) -> int:
        """Bytes that a sequence of so many tokens has in caches that are not packed by qoff."""

    @abstractmethod
    def memory_of(
        self,
        plan: Plan,
        on_gpu: bool,
        device: torch.device,
        dtype: torch.dtype,
        tiled: bool = False,
        cores: int | None = None,
    ) -> Memory:
        """What a plan takes beside the weights, with hidden states of `dtype`.

        on_gpu: whether for a GPU, which `device` is where there is one. cores: of a CPU; None: of
        this one.
        """

    @property
    def attention(self) -> HeadShape | None:
        """That of the first layer which attends; None where nothing is packed."""
        return next((shape for shape in self.shapes if not shape.indexes), None)

    @property
    def queries(self) -> float:
        """Query heads to a KV head of it."""
        return 1.0 if self.attention is None else self.attention.heads / self.attention.kv_heads

    @property
    def num_layers(self) -> int:
        return len(self.checkpoint.layers)

    @cached_property
    def layouts(self) -> Callable[[str], Layouts]:
        """What its units take, by the packing on the device; kept for all plans."""
        return cache(partial(Layouts, self.checkpoint))

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer's weights as they are stored."""
        return tuple(_bytes(file) for file in self.checkpoint.layers)

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of the weights that the logits are computed with."""
        outer = self.checkpoint.outer
        return sum(outer.weights[name].nbytes for name in unit_weights(HEAD, outer))

    @cached_property
    def layer_bits(self) -> int:
        """Bits of the layers' matrices, on average: of the widths that there are, the nearest."""
        layers = self.checkpoint.layers
        entries = (entry for file in layers for entry in file.weights.values())
        columns = sum(math.prod(e.shape) for e in entries if len(e.shape) > 1)
        return _nearest_bits(8 * sum(self.layer_bytes) / max(1, columns))

    @cached_property
    def head_bits(self) -> int:
        """The same of the matrix of the logits."""
        return _nearest_bits(8 * self.head_bytes / self.head_columns)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all weights as they are stored."""
        return sum(map(_bytes, self.checkpoint.files))

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert; 0 where there is none."""
        experts = self.experts
        if experts is None:
            return 0
        weights = (item for file in self.checkpoint.layers for item in file.weights.items())
        found = sum(entry.nbytes for name, entry in weights if is_expert(name))
        return found // (experts.count * sum(experts.layers))

    @property
    def parameters(self) -> int:
        """Elements of all matrices and vectors."""
        files = self.checkpoint.files
        return sum(math.prod(entry.shape) for file in files for entry in file.weights.values())


def _nearest_bits(bits: float) -> int:
    return min(BITS, key=lambda b: abs(b + 0.5 - bits))


def _bytes(file: WeightFile) -> int:
    return sum(entry.nbytes for entry in file.weights.values())
