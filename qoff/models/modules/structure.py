"""What is where in a model of transformers, without weights, and which of it is quantized."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qoff.budgets import CPU
from qoff.errors import UnsupportedModelError
from qoff.kernels.layout.packing import ROW_BLOCK
from qoff.memory.plan import EMBEDDING, LM_HEAD, PER_LAYER

# Of transformers' models: since 5.24, and before.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
_LINEAR = ("Linear", "FalconLinear")  # classes that compute x @ W.T + bias
_GROUPED = ("DeepseekV4GroupedLinear",)
ROUTERS = ("gate", "router", "shared_expert_gate")  # modules that choose experts
_BEFORE_FIRST = 8  # rows of a table of positions before that of the first token, at most
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")  # of transformers' experts modules


@dataclass(frozen=True)
class UnitWeight:
    """A parameter or buffer: its name in the model's state dict, its module, its attribute."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.module, self.attribute)
        return found

    def put(self, value: Tensor) -> None:
        """Replace the tensor."""
        if self.attribute in self.module._buffers:
            self.module._buffers[self.attribute] = value
        else:
            self.module._parameters[self.attribute] = nn.Parameter(value, requires_grad=False)


class Parts(Protocol):
    """A weight of experts: a tensor [experts, ...], or what reads one after the other."""

    def __getitem__(self, expert: int, /) -> Tensor: ...


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K] of a weight: all of it, or that of one expert.

    expert: its number in a weight [experts, ...]. transposed: the weight has it as [K, N].
    """

    name: str  # in the checkpoint
    shape: tuple[int, int]
    expert: int | None = None
    transposed: bool = False
    routes: bool = False  # it chooses experts
    grouped: bool = False  # block-diagonal: see `groups_of`

    @property
    def fixed(self) -> bool:
        """Whether it is rounded to its bits whatever it is multiplied by."""
        return self.routes or self.grouped

    def of(self, weight: Parts) -> Tensor:
        """The matrix, contiguous [N, K], in a weight, or in what has the parts of its experts."""
        if self.expert is None:
            assert isinstance(weight, Tensor)
            part = weight
        else:
            part = weight[self.expert]
        return (part.T if self.transposed else part).contiguous()


@dataclass(frozen=True)
class Structure:
    """A model in units: its decoder layers, and what is outside of them."""

    model: Any
    path: str  # of the decoder's list of layers
    layers: nn.ModuleList
    embedding: UnitWeight
    head: UnitWeight | None  # None: tied to the embedding
    layer_table: UnitWeight | None = None  # embeddings of layers, of which rows are read

    @classmethod
    def of(cls, model: Any) -> Structure:
        """Find the layers: the longest list of modules in the decoder that is in no other list.

        Raises UnsupportedModelError where there is none, where weights outside of one layer are
        tied to others than the embedding, without an embedding and a linear head, and for a model
        that remembers what it read within its modules.
        """
        inside = any(hasattr(module, "_setup_cache") for module in model.modules())
        if inside or not cache_argument(model) or not model._supports_default_dynamic_cache():
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps its states outside of transformers' DynamicCache, "
                "where those of several sequences would get mixed up; it is not supported"
            )
        path, layers = _layers(model)
        if not layers:
            raise UnsupportedModelError(f"{type(model).__name__} has no decoder layers at {path}")
        names = {id(module): name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no embedding and linear head that qoff knows how to "
                f"run, but {type(embedding).__name__} and {type(head).__name__}"
            )
        config = model.config.get_text_config(decoder=True)
        wanted = getattr(config, "num_hidden_layers", None)
        # LongCat counts two attentions of a layer there, and its layers elsewhere.
        if len(layers) not in (wanted, getattr(config, "num_layers", None)):
            raise UnsupportedModelError(
                f"{type(model).__name__} has {len(layers)} decoder layers at {path}, but "
                f"num_hidden_layers is {wanted}; qoff does not know which they are"
            )
        table = UnitWeight(f"{names[id(embedding)]}.weight", embedding, "weight")
        of_head, ties = f"{names[id(head)]}.weight", model.all_tied_weights_keys
        tied = head.weight is embedding.weight or of_head in ties  # it may not be tied yet
        own = None if tied else UnitWeight(of_head, head, "weight")
        others = [k for k in ties if k != of_head]
        if others:
            raise UnsupportedModelError(
                f"{type(model).__name__} shares weights among modules ({others[0]}); supported: a "
                "head tied to the embedding"
            )
        return cls(model, path, layers, table, own, _layer_table(model))

    @property
    def outputs(self) -> Any:
        """The head's module, tied or not."""
        return self.model.get_output_embeddings()

    def layer(self, index: int) -> list[UnitWeight]:
        """What a layer holds, as its file has it."""
        return list(_places(self.layers[index], f"{self.path}.{index}."))

    def floats(self, index: int, quantized: Container[str]) -> list[UnitWeight]:
        """What of a layer is not quantized; quantized: names of matrices that are."""
        return [place for place in self.layer(index) if is_float(matrices_of(place), quantized)]

    def outer(self) -> list[UnitWeight]:
        """What is outside of layers and tables: norms, positions, the head's bias."""
        inside = {id(x) for x in (*self.layers.parameters(), *self.layers.buffers())}
        inside |= {id(self.outputs.weight), *(id(table.tensor) for table in self.tables)}
        found = _places(self.model, "")
        return [p for p in found if id(p.tensor) not in inside]

    @property
    def tables(self) -> list[UnitWeight]:
        """Embeddings, and the head that is tied to none."""
        found = (self.embedding, self.head, self.layer_table)
        return [table for table in found if table is not None]

    def unit_of(self, name: str) -> int | None:
        """The layer that a name of the state dict belongs to; None: outside of them."""
        found = re.match(rf"{re.escape(self.path)}\.(\d+)(\.|$)", name)
        return int(found[1]) if found else None

    def stored_as(self, place: UnitWeight) -> str:
        """The name in the checkpoint."""
        if place is self.embedding:
            return EMBEDDING
        if place is self.layer_table:
            return PER_LAYER
        return LM_HEAD if place is self.head else place.name


def cache_argument(model: nn.Module) -> str | None:
    """What a model's forward pass calls its cache; None: it has none, or a dict (XLM)."""
    known = signature(model.forward).parameters
    kinds = {name: str(known[name].annotation) for name in _CACHE_ARGUMENTS if name in known}
    return next((name for name, kind in kinds.items() if "dict[" not in kind.lower()), None)


def has_position_table(model: nn.Module, limit: int | None, others: Sequence[nn.Module]) -> bool:
    """Whether positions are rows of a table, which ends at this limit or a few rows later.

    others: modules that are tables of something else.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m not in others]
    ends = [table.num_embeddings for table in tables]
    named = model.named_buffers()
    ends += [len(x) for name, x in named if name.endswith("embed_positions")]  # GPT-J
    return limit is not None and any(limit <= end <= limit + _BEFORE_FIRST for end in ends)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the transposed linear layer of GPT-2 and its kin."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes x @ W.T + bias; a router may look like one."""
    return isinstance(module, nn.Linear) and type(module).__name__ in _LINEAR


def groups_of(module: nn.Module) -> int:
    """Groups of inputs that a block-diagonal linear layer has a matrix each for; 0: another layer.

    Its weight has the matrices one above the other; x is [..., groups, K] (DeepSeek V4).
    """
    return int(module.n_groups) if type(module).__name__ in _GROUPED else 0  # type: ignore[arg-type]


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts as transformers' interface for their forward pass has them."""
    known = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
    return all(hasattr(module, name) for name in known)


def matrices_of(place: UnitWeight) -> list[Matrix]:
    """The matrices that a weight of a layer may be stored as; none: it stays a float tensor."""
    module: Any = place.module
    weight, turned = place.tensor, is_conv1d(module)
    groups = groups_of(module)
    plain = is_linear(module) or turned or (groups and not len(weight) % (groups * ROW_BLOCK))
    whole = place.attribute == "weight" and plain
    if not whole:
        if place.attribute not in _MATRICES or weight.dim() != 3 or not is_experts(module):
            return []
        turned = bool(module.is_transposed)
    rows, columns = weight.shape[:-3:-1] if turned else weight.shape[-2:]
    if whole:
        routes = place.name.split(".")[-2] in ROUTERS
        return [Matrix(place.name, (rows, columns), None, turned, routes, bool(groups))]
    experts = range(len(weight))
    return [Matrix(f"{place.name}.{e}", (rows, columns), e, turned) for e in experts]


def is_float(parts: Sequence[Matrix], quantized: Container[str]) -> bool:
    """Whether a weight, given as its `matrices_of`, stays as it is.

    Which do the file knows, as groups may not divide the columns of some.
    """
    return not parts or parts[0].name not in quantized


def buffers_from_config(model: Any, device: torch.device = CPU) -> int:
    """Give the buffers that no checkpoint has (of rotary embeddings, say) their values.

    transformers computes them where it initializes weights; those that are meta stay so. Returns
    their bytes on the device.
    """
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._buffers[attribute] = torch.empty_like(buffer, device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            tensor._is_hf_initialized = True
    model.initialize_weights()
    total = 0
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = buffer.to(device)
                total += buffer.nbytes
    return total


def _layer_table(model: Any) -> UnitWeight | None:
    """Embeddings of layers (Gemma 3n)."""
    for name, module in model.named_modules():
        if name.endswith("embed_tokens_per_layer") and isinstance(module, nn.Embedding):
            return UnitWeight(f"{name}.weight", module, "weight")
    return None


def _layers(model: Any) -> tuple[str, nn.ModuleList]:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inner = _lists(decoder) if isinstance(decoder, nn.Module) else set()
    if not inner:  # ModernBERT calls its head the decoder
        inner = _lists(model)
    lists = {name: module for name, module in model.named_modules() if id(module) in inner}
    outermost = {
        name: module
        for name, module in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
    }
    if not outermost:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder layers")
    path = max(outermost, key=lambda name: len(outermost[name]))
    return path, outermost[path]


def _lists(module: nn.Module) -> set[int]:
    return {id(m) for m in module.modules() if isinstance(m, nn.ModuleList)}


def _places(module: nn.Module, prefix: str) -> Iterator[UnitWeight]:
    """Parameters and persistent buffers of a module, in the order of its state dict."""
    for path, part in module.named_modules(prefix=prefix.removesuffix(".")):
        before = f"{path}." if path else ""
        for attribute, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and attribute not in part._non_persistent_buffers_set:
                yield UnitWeight(f"{before}{attribute}", part, attribute)


def layer_width(layer: nn.Module, config: Any) -> int:
    """Floats of a token that a layer computes: inputs and outputs of all its matrices.

    Of experts those of a token, as config says how many, or of all.
    """
    total = experts = most = 0
    for name, weight in layer.named_parameters():
        if "expert" in name and "shared" not in name and weight.dim() > 1:
            experts += sum(weight.shape[-2:])
            most = max(most, sum(weight.shape[-2:]))
        elif weight.dim() > 1:
            total += sum(weight.shape[-2:])
    topk = getattr(config, "num_experts_per_tok", None)
    return total + (experts if topk is None else min(experts, 3 * topk * most))
