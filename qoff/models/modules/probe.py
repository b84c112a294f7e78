"""Whether a packed cache can serve the attention of transformers' modules, found out by a trial.

The model without weights reads a few tokens on the meta device, which computes shapes alone. What
its layers ask of transformers' attention interface says what the attention is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode

from qoff.errors import UnsupportedModelError
from qoff.kernels.layout.heads import HeadShape
from qoff.kvcache.quant import UnpackableError

from .attention import MASK, masked
from .sequence_memory import LayerMemory, cache_bytes
from .structure import is_experts

_TOKENS = 3
# What the interface may be handed beside shapes: without a meaning for what is computed here, or
# known to `PackedAttention`.
_KNOWN = ("position_ids", "cache_position", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k")


class _RefusedError(Exception):
    """Why there can be no packed cache."""


class UnknownCacheError(Exception):
    """Why sequences cannot keep what a model remembers in tensors that they share."""


def head_shapes(
    model: Any, call: Callable[..., object], states: Any
) -> tuple[dict[int, HeadShape], dict[int, int]]:
    """The attention of each layer that a packed cache can serve, by transformers' numbers.

    Beside it the layers that attend to the keys and values of another one, each with that one.
    model: on the meta device, with attention `attention.NAME`. call: its forward pass, of ids, a
    cache, mask and positions; states: an empty cache. Raises UnpackableError with the reason
    why there can be no packed cache.
    """
    trial = _Trial(states)
    try:
        if not may_attend(states):
            raise _RefusedError("it has no attention")
        _try(model, call, states, trial, _TOKENS, _seen(states))
        return trial.shapes(), trial.lenders
    except Exception as error:  # the code of any model
        raise UnpackableError(
            f"the KV cache of {type(model).__name__} cannot be packed: {_reason(error)}; "
            "use kv=None"
        ) from error


def layer_memory(
    model: Any,
    call: Callable[..., object],
    states: Any,
    packed: Container[int],
    limit: int | None,
) -> list[LayerMemory]:
    """What each layer of a cache keeps of a sequence; packed: layers whose K and V are elsewhere.

    limit: tokens that a sequence may have; None: any number. The other arguments are those of
    `head_shapes`, the model's attention too. Raises UnknownCacheError for what sequences of a
    padded batch cannot keep together.
    """
    from transformers import cache_utils
    from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

    known: tuple[type, ...] = (DynamicLayer, LinearAttentionCacheLayerMixin)
    if hasattr(cache_utils, "DummyLayer"):  # not in transformers 5.17
        known += (cache_utils.DummyLayer,)
    try:
        for layer in states.layers:
            if not isinstance(layer, known) or type(layer).__module__ != DynamicLayer.__module__:
                raise _RefusedError(f"its cache has a {type(layer).__name__}")
            if hasattr(layer, "indexer_keys"):
                raise _RefusedError("it attends by an index of keys")
        before = len(states.layers)
        _try(model, call, states, _Shapes(states, limit), _TOKENS, _seen(states))
        if len(states.layers) > before:
            raise _RefusedError("a pass adds layers to its cache, for what it computes again")
    except Exception as error:  # the code of any model
        raise UnknownCacheError(_reason(error)) from error
    return [LayerMemory.of(layer, i in packed) for i, layer in enumerate(states.layers)]


def bytes_of_cache(
    model: Any, call: Callable[..., object], empty: Callable[[], Any], tokens: int
) -> list[int]:
    """Bytes of each layer of a cache of one sequence when so many tokens were read.

    empty: makes a cache; the other arguments are those of `head_shapes`. Raises
    UnsupportedModelError where a trial does not tell.
    """
    return cache_bytes(_read(model, call, empty, tokens))


def count_ops(model: Any, call: Callable[..., object], empty: Callable[[], Any]) -> int:
    """How many of torch's ops a pass of one token takes, but for those of experts.

    Arguments, and what is raised: as for `bytes_of_cache`.
    """
    with _Counting() as counting:
        _read(model, call, empty, 1)
    return counting.count


class _Counting(TorchDispatchMode):
    """Counts the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return op(*args, **(kwargs or {}))


def _read(model: Any, call: Callable[..., object], empty: Callable[[], Any], tokens: int) -> Any:
    """The cache of one sequence when so many tokens were read."""
    # The code of some models puts the mask on the meta device, where another looks into it.
    for mask in (torch.ones(1, tokens, dtype=torch.int64), None):
        states = empty()
        try:
            _try(model, call, states, _Shapes(states, limit=0), tokens, mask)
        except Exception as error:  # the code of any model
            failed = error
        else:
            return states
    raise UnsupportedModelError(
        f"qoff.LLM does not know what {type(model).__name__} remembers: {_reason(failed)}; "
        "use qoff.load, which leaves that to transformers"
    ) from failed


def check_text(model: Any) -> None:
    """Raise UnsupportedModelError unless a model that sees, without weights, reads text alone."""

    def call(ids: Tensor, *_: Any, **__: Any) -> None:
        model(input_ids=ids)

    nothing = SimpleNamespace(layers=[])
    try:
        _try(model, call, nothing, _Shapes(nothing), _TOKENS, None)
    except Exception as error:  # the code of any model
        raise UnsupportedModelError(
            f"{type(model).__name__} does not read text without an image: {_reason(error)}; it is "
            "not supported"
        ) from error


def _seen(states: Any) -> Tensor | None:
    """A mask of a few tokens, all of which are there; models look into it."""
    if not may_attend(states):
        return None  # means the same; layers may multiply by it, which is on another device
    return torch.ones(1, _TOKENS, dtype=torch.int64)


def _try(
    model: Any,
    call: Callable[..., object],
    states: Any,
    attention: _Shapes,
    tokens: int,
    mask: Tensor | None,
) -> None:
    """Have a model on the meta device read some tokens."""
    from .passes import ModulePass

    ids, positions = torch.zeros(2, 1, tokens, dtype=torch.int64, device="meta")

    def work() -> None:
        # As if a mask that chooses rows chose all.
        with fx_config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
            call(ids, states, attention_mask=mask, position_ids=positions)

    with torch.device("meta"), _without_experts(model), _unvalidated(), _by_torch():
        run = ModulePass(work, torch.empty(2, 0))
        run.attention = attention
        run.switch()


@contextmanager
def _by_torch() -> Iterator[None]:
    """Without kernels of packages like mamba-ssm, which know no meta device.

    transformers leaves them out where it exports a model.
    """
    from transformers.integrations import hub_kernels

    asks = "is_torchdynamo_exporting"
    before = getattr(hub_kernels, asks, None)
    if before is None:  # of a version that does not ask
        yield
        return
    setattr(hub_kernels, asks, lambda: True)
    try:
        yield
    finally:
        setattr(hub_kernels, asks, before)


@contextmanager
def _unvalidated() -> Iterator[None]:
    """Without torch's checks of distributions (Gemma 3n has one), which look at values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def may_attend(states: Any) -> bool:
    """Whether a model may have attention, of which its cache may not know beforehand."""
    return not states.layers or any(map(_attends, states.layers))


def _attends(layer: Any) -> bool:
    """Whether a layer of a cache may hold keys and values, beside states or alone."""
    from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

    return isinstance(layer, DynamicLayer) or not isinstance(layer, LinearAttentionCacheLayerMixin)


def _reason(error: Exception) -> str:
    known = isinstance(error, _RefusedError)
    found = str(error) if known else f"a trial fails ({type(error).__name__}: {error})"
    return " ".join(found.split())


class _Shapes:
    """Attention without values, in place of a `PackedAttention`.

    states: the cache. limit: tokens that a sequence may have; None: any number. Refuses a layer
    whose cache forgets tokens that its mask lets others see: what it answers depends on its passes.
    """

    def __init__(self, states: Any, limit: int | None = None) -> None:
        kept = {i: getattr(layer, "sliding_window", None) for i, layer in enumerate(states.layers)}
        self._kept = {i: n for i, n in kept.items() if n and (limit is None or n < limit)}

    def mask(
        self, mask_function: Callable[..., Tensor], window: int | None, shape: tuple[int, ...]
    ) -> Tensor:
        return masked(window, shape)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
    ) -> Tensor:
        layer: Any = getattr(module, "layer_idx", None)
        if layer in self._kept and getattr(mask, MASK, 0) is None:
            raise _RefusedError(
                f"the cache of layer {layer} keeps the newest {self._kept[layer]} tokens of a "
                "sequence, and its mask shows all"
            )
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


class _Trial(_Shapes):
    """Notes what attention layers ask for."""

    def __init__(self, states: Any) -> None:
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        super().__init__(states)
        kinds = (DynamicLayer, DynamicSlidingWindowLayer)
        self._wanted = [i for i, layer in enumerate(states.layers) if type(layer) in kinds]
        self._found: dict[int, HeadShape] = {}
        self._keys: dict[int, Tensor] = {}
        self.lenders: dict[int, int] = {}

    def mask(
        self, mask_function: Callable[..., Tensor], window: int | None, shape: tuple[int, ...]
    ) -> Tensor:
        if not is_standard(mask_function, window):
            raise _RefusedError("its mask is neither causal nor a sliding window")
        return super().mask(mask_function, window, shape)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
    ) -> Tensor:
        layer: Any = getattr(module, "layer_idx", None)
        lender = next((i for i, own in self._keys.items() if own is k), None)
        taken = layer in self._found or layer in self.lenders
        if taken or (layer not in self._wanted and (lender is None or layer is None)):
            raise _RefusedError(f"{type(module).__name__} has no layer of the cache for itself")
        if not getattr(module, "is_causal", True):
            raise _RefusedError(f"{type(module).__name__} is not causal")
        if k.shape != v.shape or k.shape[2] != _TOKENS or q.shape[3] != k.shape[3]:
            shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
            raise _RefusedError(f"its queries, keys and values differ in shape: {shapes}")
        others = [n for n, x in more.items() if isinstance(x, Tensor) and n not in _KNOWN]
        if others:
            raise _RefusedError(f"it attends with {others[0]}, which there is no kernel for")
        if not hasattr(mask, MASK):
            raise _RefusedError(
                "its mask is not a mask of transformers' mask interface, as it was made"
            )
        scaling, cap = more.get("scaling"), more.get("softcap")
        shape = HeadShape(
            q.shape[1],
            k.shape[1],
            q.shape[3],
            q.shape[3] ** -0.5 if scaling is None else float(scaling),
            getattr(mask, MASK),
            soft_cap=float(cap or 0.0),
        )
        if lender is None:
            self._found[layer], self._keys[layer] = shape, k
        elif shape == self._found[lender]:
            self.lenders[layer] = lender
        else:
            raise _RefusedError(f"layer {layer} attends to keys of layer {lender} in another way")
        return super().attend(module, q, k, v, mask)

    def shapes(self) -> dict[int, HeadShape]:
        missing = sorted({*self._wanted} - {*self._found})
        if missing or not self._found:
            which = f"layer {missing[0]}" if missing else "it"
            raise _RefusedError(f"{which} does not use transformers' attention interface")
        return dict(sorted(self._found.items()))


def is_standard(mask_function: Callable[..., Tensor], window: int | None) -> bool:
    """Whether a mask is causal, or a window of so many tokens, the token itself included."""
    from transformers.masking_utils import causal_mask_function

    if window is None:
        plain: Callable[..., object] = causal_mask_function
        return mask_function is plain
    last = 2 * window + 3
    with torch.device("cpu"):
        zero, keys = torch.zeros(1, dtype=torch.int64), torch.arange(last + 1)
        near = sorted({0, 1, window - 1, window, window + 1, last})
        for query in near:
            at = torch.full_like(keys, query)
            seen = mask_function(zero, zero, at, keys)
            if not torch.equal(seen, (keys <= query) & (query - keys < window)):
                return False
    return True


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    """Which experts are chosen is not known without values."""
    experts = [module for module in model.modules() if is_experts(module)]
    for module in experts:
        module.forward = lambda hidden, *_: torch.empty_like(hidden)
    try:
        yield
    finally:
        for module in experts:
            del module.forward
