"""What plans know of a model that runs through transformers' modules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from qoff.budgets import CPU
from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import OUTER_FILE
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.states import StateShape
from qoff.kvcache import KVQuant
from qoff.kvcache.quant import UnpackableError
from qoff.memory.plan.units import expert_matrix, is_expert
from qoff.models.modules.configs import DTYPE, LAYOUT, build, read_config
from qoff.models.modules.outline import Outline
from qoff.models.modules.sequence_memory import SequenceMemory
from qoff.models.modules.stored_layout import StoredLayout
from qoff.models.modules.structure import Structure, is_experts
from qoff.models.spec_parts import ExpertsSpec
from qoff.quant import QuantConfig

from .manual import Memory, Plan
from .modules import memory_of_modules
from .planned_files import PlannedWeight, check_floats, planned_file, planned_layers
from .profile import MachineProfile
from .sizes import Sizes

_OP_CALLS = 0.65  # of a call of ours: what one of torch's ops takes; `bench.planner --only modules`
_NO_TENSORS = 1 << 30  # a limit of counts in a config that no file bounds
_CHOOSES = ("top_k", "num_experts_per_tok")  # attributes of modules that choose experts

_Known = tuple[Outline, SequenceMemory]


@dataclass(frozen=True)
class ModuleSizes(Sizes):
    """Of a model of transformers' modules. trust_remote_code: run code that came with it."""

    checkpoint: Checkpoint
    stored: bool = False
    trust_remote_code: bool = False
    _known: dict[tuple[bool, torch.dtype], _Known] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, config: Mapping[str, Any], quant: QuantConfig | None = None) -> Self:
        """The checkpoint that a model of floats is converted to; config: that of Hugging Face.

        What is not quantized is taken to be stored as the config says that the model is. Raises
        UnsupportedModelError as `read_config` does, and for weights whose codes are taken over,
        whose formats only their files tell.
        """
        folder, quant = Path("model"), quant or QuantConfig()
        check_floats(config)
        own = {key: value for key, value in config.items() if key != "quantization_config"}
        model = build(read_config(own, folder, tensors=_NO_TENSORS))
        layout = StoredLayout(Structure.of(model), quant)
        floats = _dtype(model.config.get_text_config(decoder=True))
        path, last = layout.structure.path, layout.units - 1
        layers = (
            (f"{path}.{i}.", list(_planned(layout, i, floats))) for i in range(layout.units - 1)
        )
        files = planned_layers(folder, layers, quant)
        outer = planned_file(folder / OUTER_FILE, _planned(layout, last, floats), quant)
        own["quantization_config"] = {"layout": LAYOUT}
        return cls(Checkpoint(folder, own, files, outer))

    @property
    def native(self) -> bool:
        return False

    @property
    def one_by_one(self) -> bool:
        return self._outline.one_by_one

    @property
    def alone(self) -> bool:
        return self._held.alone

    @property
    def whole_prompts(self) -> bool:
        return self._held.whole_prompts

    @cached_property
    def shapes(self) -> tuple[HeadShape, ...]:
        return tuple(self._outline.packed_shapes.values())

    @cached_property
    def readers(self) -> tuple[int, ...]:
        return self._outline.readers

    @property
    def hidden_size(self) -> int:
        return int(self._outline.text_config.hidden_size)

    @property
    def heads(self) -> int:
        return self._outline.heads

    @cached_property
    def experts(self) -> ExpertsSpec | None:
        files = self.checkpoint.layers
        found = [{n: one for n in f.quantized if (one := expert_matrix(n))} for f in files]
        layers = tuple(map(bool, found))
        if not any(layers) or not self.one_by_one:
            return None
        first = layers.index(True)
        weights, matrices = files[first].weights, found[first]
        count = 1 + max(number for number, _ in matrices.values())
        kinds = {kind: weights[name].shape for name, (_, kind) in matrices.items()}
        inner = kinds["down_proj"][1]
        chosen = min(count, self._chosen(first) or count)
        return ExpertsSpec(count, chosen, inner, layers, gated="gate_up_proj" in kinds)

    @property
    def expert_width(self) -> int:
        return self.hidden_size

    @cached_property
    def layer_columns(self) -> int:
        files = self.checkpoint.layers
        weights = (item for file in files for item in file.weights.items())
        apart = self.experts is not None
        return sum(
            math.prod(entry.shape)
            for name, entry in weights
            if len(entry.shape) > 1 and not (apart and is_expert(name))
        )

    @property
    def last_columns(self) -> int:
        return 0  # modules compute all rows of the last layer

    @property
    def expert_columns(self) -> int:
        experts = self.experts
        if experts is None:
            return 0
        weights = (item for file in self.checkpoint.layers for item in file.weights.items())
        found = sum(math.prod(entry.shape) for name, entry in weights if is_expert(name))
        return found // experts.count

    @property
    def head_columns(self) -> int:
        return int(self._outline.structure.outputs.weight.numel())

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        return ()

    @property
    def position_limit(self) -> int | None:
        return self._outline.position_limit

    @property
    def index_top(self) -> int | None:
        return None

    def check_positions(self, tokens: int) -> None:
        self._outline.check_positions(tokens)

    def calls_s(self, machine: MachineProfile) -> float:
        return _OP_CALLS * self._pass_ops * machine.device.call_s

    def unpacked_bytes(self, tokens: int, on_gpu: bool) -> int:
        dtype = torch.float16 if on_gpu else DTYPE
        return self._of(on_gpu, dtype, CPU)[1].nbytes(tokens)

    def memory_of(
        self,
        plan: Plan,
        on_gpu: bool,
        device: torch.device,
        dtype: torch.dtype,
        tiled: bool = False,
        cores: int | None = None,
    ) -> Memory:
        outline, held = self._of(on_gpu, dtype, device)
        packs, outline = outline.kv is not None, copy(outline)
        outline.kv, outline.device_memory = plan.kv if packs else None, plan.device_memory
        if not on_gpu or not packs:
            return memory_of_modules(plan, outline, held, tiled)
        from .gpu_modules import memory_of_modules_on_gpu  # needs Triton

        return memory_of_modules_on_gpu(plan, outline, held, tiled)

    @cached_property
    def _pass_ops(self) -> int:
        return self._outline.pass_ops()

    @property
    def _outline(self) -> Outline:
        return self._of(False, DTYPE, CPU)[0]

    @property
    def _held(self) -> SequenceMemory:
        return self._of(False, DTYPE, CPU)[1]

    def _of(self, on_gpu: bool, dtype: torch.dtype, device: torch.device) -> _Known:
        """The model, with a packed cache where there can be one, and what its sequences take."""
        if (on_gpu, dtype) not in self._known:
            try:
                found = self._with(KVQuant(), on_gpu, dtype, device)
            except UnpackableError:
                found = self._with(None, on_gpu, dtype, device)
            self._known[on_gpu, dtype] = found
        return self._known[on_gpu, dtype]

    def _with(
        self, kv: KVQuant | None, on_gpu: bool, dtype: torch.dtype, device: torch.device
    ) -> _Known:
        trusted = self.trust_remote_code
        outline = Outline(self.checkpoint, trusted, kv, on_gpu, device, dtype)
        return outline, outline.sequence_memory()

    def _chosen(self, layer: int) -> int | None:
        """Experts of a token in a layer; None where no module tells."""
        found = self._outline.structure.layers[layer]
        holders = [m for m in found.modules() if any(map(is_experts, m.children()))]
        there = (module for one in holders for module in one.modules())
        told = (getattr(module, name, None) for module in there for name in _CHOOSES)
        config = getattr(self._outline.text_config, _CHOOSES[1], None)
        return next((n for n in (*told, config) if isinstance(n, int)), None)


def _planned(layout: StoredLayout, unit: int, floats: torch.dtype) -> Iterator[PlannedWeight]:
    """The weights of a unit in file order: floats first."""
    places = layout.places(unit)
    matrices = [layout.matrices(place) for place in places]
    for place, found in zip(places, matrices, strict=True):
        if not found:
            tensor = place.tensor
            dtype = floats if tensor.is_floating_point() else tensor.dtype
            yield PlannedWeight(layout.structure.stored_as(place), tuple(tensor.shape), dtype=dtype)
    for matrix in (one for found in matrices for one in found):
        yield PlannedWeight(matrix.name, matrix.shape, layout.form(matrix))


def _dtype(config: Any) -> torch.dtype:
    """What a config says that weights are; where it says nothing, float32."""
    found = getattr(config, "dtype", None) or DTYPE
    return found if isinstance(found, torch.dtype) else DTYPE
