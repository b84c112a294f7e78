"""LoRA adapters that PEFT saved, as the native decoder adds them to its packed matrices.

A packed matrix may be several of the model's: its parts have factors of their own, and their rows
lie as the packed matrix's do (`names.Part`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from qoff.errors import ArgumentError, FormatError, UnsupportedModelError, raised_as
from qoff.kernels.cpu.linear.scratch import low_rank_bytes
from qoff.kernels.layout.low_rank import BLOCK, LowRank, LowRanks
from qoff.kernels.processor import pool_threads
from qoff.schema import read_object, shown

from .forward_pass import AdaptedRows, mlp_tokens
from .names import Part, Weight, layer_weights
from .spec import DecoderSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _FACTOR = "base_model.model.", re.compile(r"(.+)\.lora_(A|B)\.weight")
_NOT_THERE = {  # what changes what an adapter computes, with what it is called
    "use_dora": "DoRA",
    "lora_bias": "biases of its own (lora_bias)",
    "modules_to_save": "whole modules (modules_to_save)",
    "target_parameters": "adapters of parameters (target_parameters)",
    "trainable_token_indices": "rows of the embedding (trainable_token_indices)",
    "layer_replication": "layers that are there twice (layer_replication)",
    "alora_invocation_tokens": "aLoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
}


class AdapterFile:
    """A folder that PEFT's `save_pretrained` wrote, checked, without its weights in memory.

    Raises FormatError where it is none, UnsupportedModelError for other kinds than LoRA of the
    linear layers of decoder layers, ArgumentError for one of another model.
    """

    def __init__(self, path: str | PathLike[str], spec: DecoderSpec) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ArgumentError(f"{path}: is no folder; give one that PEFT saved an adapter to")
        self._config = read_object(self.path / CONFIG, "PEFT's save_pretrained writes it")
        self._check_config()
        weights = self.path / WEIGHTS
        refused = raised_as(FormatError, f"{weights}: cannot be read", "save it as safetensors")
        with refused, safe_open(weights, "pt") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        self._names = self._modules(spec, shapes)
        self.layers = [self._plan(spec, layer, shapes) for layer in range(spec.num_layers)]

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(one.nbytes for layer in self.layers for one in layer.values())

    def load(self) -> list[dict[str, LowRank]]:
        """Its factors, by layer and the name of the packed matrix. Raises FormatError."""
        weights = self.path / WEIGHTS
        with raised_as(FormatError, f"{weights}: cannot be read"), safe_open(weights, "pt") as file:
            return [
                {name: one.load(file, weights) for name, one in layer.items()}
                for layer in self.layers
            ]

    def _check_config(self) -> None:
        config, path = self._config, self.path / CONFIG
        kind = config.get("peft_type")
        if kind != "LORA":
            raise UnsupportedModelError(f"{path}: peft_type is {shown(kind)}; supported: 'LORA'")
        for key, words in _NOT_THERE.items():
            if config.get(key):
                raise UnsupportedModelError(
                    f"{path}: the adapter has {words}; supported: LoRA of linear layers"
                )
        if config.get("bias", "none") != "none":
            raise UnsupportedModelError(
                f"{path}: bias is {shown(config['bias'])}; supported: 'none'"
            )
        patterns = [config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
        if not all(isinstance(one, dict) for one in patterns):
            raise FormatError(f"{path}: rank_pattern and alpha_pattern are objects, by module")

    def _modules(self, spec: DecoderSpec, shapes: Mapping[str, object]) -> dict[str, str]:
        """From the model's modules in the layers to what the adapter calls them."""
        there = {
            part.source.removesuffix(".weight")
            for layer in range(spec.num_layers)
            for weight in layer_weights(spec, layer)
            if weight.columns is not None and not weight.routes
            for part in weight.parts
            if part.expert is None
        }
        found: dict[str, str] = {}
        for name in shapes:
            match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
            if match is None:
                raise UnsupportedModelError(
                    f"{self.path / WEIGHTS}: has {name[:200]}; supported: LoRA of linear layers"
                )
            called = match[1]
            # Models that a checkpoint is a part of have more in front, or less.
            mine = [x for x in there if f".{called}".endswith(f".{x}")]
            mine = mine or [x for x in there if x.endswith(f".{called}")]
            if not mine:
                raise UnsupportedModelError(
                    f"{self.path}: adapts {called[:200]}, which is no linear layer of this model's "
                    "decoder layers; supported are these, not embeddings, heads or experts"
                )
            if called.endswith(".kv_b_proj"):
                raise UnsupportedModelError(
                    f"{self.path}: adapts {called[:200]}, parts of which latent attention "
                    "multiplies by apart; supported are the other linear layers"
                )
            found[max(mine, key=len)] = called
        return found

    def _plan(
        self, spec: DecoderSpec, layer: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, _Planned]:
        """What the matrices of a layer get."""
        found: dict[str, _Planned] = {}
        for weight in layer_weights(spec, layer):
            if weight.columns is None or weight.routes:
                continue
            factors = [self._factors(part, weight.columns, shapes) for part in weight.parts]
            if any(factors):
                found[weight.name] = _Planned(weight, factors)
        return found

    def _factors(
        self, part: Part, columns: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> _Factors | None:
        """Those of a part of a matrix, if there are."""
        called = self._names.get(part.source.removesuffix(".weight"))
        if called is None or part.expert is not None:
            return None
        prefix = _PREFIX if any(name.startswith(_PREFIX) for name in shapes) else ""
        down, up = (f"{prefix}{called}.lora_{which}.weight" for which in "AB")
        a, b = shapes.get(down), shapes.get(up)
        if a is None or b is None or len(a) != 2 or not a[0]:
            raise FormatError(f"{self.path / WEIGHTS}: {called} has no lora_A and lora_B")
        if (a, b) != ((a[0], columns), (part.rows, a[0])):
            raise ArgumentError(
                f"{self.path}: lora_A and lora_B of {called} are {list(a)} and {list(b)}, but this "
                f"model's matrix is [{part.rows}, {columns}]; the adapter is of another model"
            )
        return _Factors(down, up, a[0], self._factor(called, a[0]))

    def _factor(self, called: str, rank: int) -> float:
        """What the product of both factors is multiplied by."""
        alpha = self._config.get("lora_alpha", 8)
        for pattern, value in (self._config.get("alpha_pattern") or {}).items():
            with raised_as(FormatError, f"{self.path / CONFIG}: alpha_pattern"):
                if re.fullmatch(rf"(.*\.)?({pattern})", called):  # as PEFT reads it
                    alpha = value
                    break
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
            raise FormatError(f"{self.path / CONFIG}: alpha is {shown(alpha)}; expected a number")
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


@dataclass(frozen=True)
class _Factors:
    """The tensors of one linear layer in an adapter's file."""

    down: str
    up: str
    rank: int
    times: float


@dataclass(frozen=True)
class _Planned:
    """What a packed matrix gets of an adapter. factors: of its parts."""

    weight: Weight
    factors: Sequence[_Factors | None]

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        assert self.weight.columns is not None
        ranks = [0 if one is None else one.rank for one in self.factors]
        return LowRank.shapes(self.weight.rows, self.weight.columns, ranks)

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return self._shapes[0][0]

    @property
    def nbytes(self) -> int:
        return sum(size * math.prod(x) for size, x in zip((4, 4, 8), self._shapes, strict=True))

    def load(self, file: Any, path: Path) -> LowRank:
        of_down, of_up, blocks = self._shapes
        down, first = torch.zeros(of_down), torch.zeros(blocks, dtype=torch.int64)
        up, at = torch.zeros(of_up), 0
        for i, (part, one) in enumerate(zip(self.weight.parts, self.factors, strict=True)):
            if one is None:
                continue
            a, b = (file.get_tensor(name).float() for name in (one.down, one.up))
            if not (a.isfinite().all() and b.isfinite().all()):
                raise FormatError(f"{path}: {one.down} or {one.up} has numbers that are not finite")
            down[at : at + one.rank] = a
            rows = self.weight.destination(i, 0, part.rows)
            up[rows // BLOCK, : one.rank, rows % BLOCK] = b * one.times
            first[rows // BLOCK] = at
            at += one.rank
        return LowRank(down, up, first)


class Adapters:
    """Adapters by name, for the rows of one batch. They are in memory after `load`.

    Raises what `AdapterFile` does.
    """

    def __init__(self, paths: Mapping[str, str | PathLike[str]], spec: DecoderSpec) -> None:
        self.names = tuple(paths)
        self.folders = {name: Path(path) for name, path in paths.items()}
        self._files = [AdapterFile(path, spec) for path in paths.values()]
        self._spec = spec
        self._layers: list[dict[str, LowRanks]] = []

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(one.nbytes for one in self._files)

    def work_bytes(self, tokens: int, recorded: int, tiled: bool) -> int:
        """What a pass of `tokens` tokens takes beside, and recordings of `recorded` rows keep."""
        most = scratch = 0
        threads = pool_threads()
        for layer in range(self._spec.num_layers):
            for weight in layer_weights(self._spec, layer):
                planned = [x.layers[layer].get(weight.name) for x in self._files]
                rank = max((x.rank for x in planned if x is not None), default=0)
                if rank and weight.columns is not None:
                    of_mlp = weight.name.startswith("mlp.")
                    some = mlp_tokens(tokens, tiled) if of_mlp else tokens
                    most = max(most, 4 * weight.rows * (some + recorded))
                    asked = low_rank_bytes(threads, some, weight.columns, rank, normed=True)
                    scratch = max(scratch, asked)
        return most + scratch

    def load(self) -> None:
        """Read them. Raises FormatError."""
        each = [file.load() for file in self._files]
        for layer in range(self._spec.num_layers):
            names = dict.fromkeys(name for one in each for name in one[layer])
            self._layers.append(
                {name: LowRanks([x[layer].get(name) for x in each]) for name in names}
            )

    def number(self, name: str | None) -> int:
        """As `adapter_number`."""
        return adapter_number(self.names, name)

    def rows(self, numbers: Sequence[int]) -> AdaptedRows | None:
        """What a pass adds whose rows have these adapters; None where none has one."""
        key = tuple(numbers)
        if max(key, default=-1) < 0:
            return None
        return AdaptedRows(key, torch.tensor(key, dtype=torch.int64), self._layers)


def adapter_number(names: Sequence[str], name: str | None) -> int:
    """Of one of several adapters; -1 for none. Raises ArgumentError for one that is not there."""
    if name is None:
        return -1
    if name not in names:
        known = ", ".join(map(shown, names)) or "none"
        raise ArgumentError(f"there is no adapter {shown(name)}; there are: {known}")
    return names.index(name)
