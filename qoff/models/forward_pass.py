"""One forward pass of a batch of sequences, from who wants its logits to the layer at work."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from qoff.kernels.layout.low_rank import LowRanks
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import CachePass, KVCache, PassingCache
from qoff.kvcache.slots import SlotSubset
from qoff.memory import Unit

from .spec import DecoderSpec

# Tokens that go through the MLP together: bounds working space at prefill.
MLP_TOKENS = 512
GPU_MLP_TOKENS = 2048  # where weights are dequantized each time
WAVE_PAIRS = 4096  # of a token and an expert, computed together where experts come one by one

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity): its weights may be damaged (see `qoff "
    "verify`), or its values overflow float16 (device='cpu' has a larger range, or "
    "dtype='bfloat16' on a GPU of compute capability 8.0 or more)"
)


class Activations(Protocol):
    """Where the hidden states of a batch are between two units."""

    def load(self) -> Tensor:
        """Return the hidden states, [M, spec.hidden_width], as the decoder computes them."""

    def store(self, hidden: Tensor) -> None:
        """Take the hidden states, perhaps fewer rows of them; what `load` returned is not used any
        more."""

    def prefetch(self) -> None:
        """Start to bring what `load` will return."""


class HiddenStates(Protocol):
    """Who wants the hidden states of a pass after the final norm."""

    ROWS: int  # at a time

    def take(self, start: int, rows: Tensor) -> None:
        """Take those of the tokens from `start` on, [m, hidden_size]."""


class ResidentActivations:
    """Hidden states that stay on the device."""

    def __init__(self) -> None:
        self._hidden: Tensor | None = None

    def load(self) -> Tensor:
        assert self._hidden is not None
        return self._hidden

    def store(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def prefetch(self) -> None:
        """They are there."""

    def forget(self) -> None:
        """Give their memory to others."""
        self._hidden = None


@dataclass(frozen=True)
class AdaptedRows:
    """Which adapter each row of a pass has, and what they add to the matrices of each layer."""

    key: tuple[int, ...]  # of each row, -1 for none
    which: Tensor  # the same, int64 [M] in host memory
    layers: Sequence[Mapping[str, LowRanks]]

    def padded(self, rows: int) -> AdaptedRows:
        """With more rows, which have none."""
        which = self.which.new_full((rows,), -1)
        which[: len(self.which)] = self.which
        return AdaptedRows((*self.key, *[-1] * (rows - len(self.key))), which, self.layers)


@dataclass(frozen=True)
class LayerWorkspace:
    """What a layer leaves between its ops, for up to `qkv.shape[0]` tokens.

    Nothing, for ops that allocate their results. Without `tiled` no value in it is needed between
    two units, and batches that take turns may share it. Layers in tiles leave values of all tokens
    in it from tile to tile, of one batch alone.
    """

    qkv: Tensor | None = None  # [M, spec.attention_width]
    attended: Tensor | None = None  # [M, spec.attended_width]
    gated: Tensor | None = None  # [at most MLP_TOKENS, or M where tiled, intermediate_size]
    tiled: bool = False
    projected: Tensor | None = None  # [M, spec.projected_rows], of latent attention

    @staticmethod
    def nbytes(
        spec: DecoderSpec, tokens: int, tiled: bool = False, itemsize: int = 4, kept: bool = False
    ) -> int:
        """Bytes of a workspace on the CPU, and of what a layer allocates besides.

        tiled: where layers come in parts, tiles of rows or experts one by one. itemsize: bytes
        of a number. kept: only what a pass keeps from part to part, of experts.
        """
        attention = tokens * (spec.attention_width + spec.attended_width + spec.projected_rows)
        together = mlp_tokens(tokens, tiled)
        mlp = together * spec.widest_mlp * (1 + 2 * any(spec.sparsity or ()))
        extra = tokens * _extra_width(spec) + together * per_layer_floats(spec)
        extra += tokens * (stream_floats(spec) + 3 * spec.hidden_size * spec.mtp)
        experts = 4 * (_kept_floats if kept else _experts_floats)(spec, tokens, tiled)
        return itemsize * (attention + mlp + extra) + experts

    @property
    def tokens(self) -> int:
        """How many there is room for."""
        return 0 if self.qkv is None else len(self.qkv)

    @property
    def memory(self) -> list[Tensor]:
        """All there is of it."""
        parts = (self.qkv, self.attended, self.gated, self.projected)
        return [part for part in parts if part is not None]

    def upto(self, tokens: int) -> LayerWorkspace:
        """The part for this many tokens."""
        parts = (self.qkv, self.attended, self.gated, self.projected)
        qkv, attended, gated, projected = (first_rows(part, tokens) for part in parts)
        return LayerWorkspace(qkv, attended, gated, self.tiled, projected)


class Begun(NamedTuple):
    """A pass whose cache is ready for it."""

    ids: Tensor  # int64 [M], the new tokens, and padding
    key: Hashable | None  # of what can be recorded
    stays: bool  # whether hidden states and KV cache stay where they are
    rows: Tensor | None = None  # the tokens embedded, [M, spec.hidden_width], where that was done


@dataclass(eq=False)
class RoundMixture:
    """What passes of a round have in common where experts come one by one.

    choices: of `native.choices`, of all passes that wait. wave: computed last, for all of these.
    on_cpu: `native.cpu_pairs.CpuPairs`, what the CPU computes of them. passes: of the round.
    """

    choices: list[Any] = field(default_factory=list)
    wave: object = None
    on_cpu: Any = None
    passes: int = 1

    def done(self, choices: Sequence[object]) -> None:
        """A pass waits no more."""
        for one in choices:
            self.choices.remove(one)
        if not self.choices:
            self.wave = self.on_cpu = None


@dataclass(eq=False)
class ForwardPass:
    """New tokens of some sequences on their way through the model, once.

    workspace: for at least M tokens; None, or not fit for tiles: the decoder makes its own.
    """

    tokens: Tensor  # int64 [M]
    ragged: Ragged
    cache: KVCache | SlotSubset | PassingCache  # the tokens before them
    # int64 [R], rows whose logits are wanted; None: of all, valid until the next pass.
    logit_rows: Tensor | None
    activations: Activations = field(default_factory=ResidentActivations)
    workspace: LayerWorkspace | None = None
    name: str = "pass"
    states: HiddenStates | None = None  # beside the logits
    previous: Tensor | None = None  # [M, hidden_size], `final` of another pass; of MTP layers
    wants_final: bool = False  # whether `final` is wanted beside the logits
    adapters: AdaptedRows | None = None
    mixture: RoundMixture = field(default_factory=RoundMixture)
    expert_jobs: Any = None  # `memory.experts.jobs.ExpertJobs`, where experts come by jobs
    joined: Sequence[ForwardPass] = ()  # passes whose rows these are, one after another
    # What the decoder sets on the way.
    begun: Begun | None = None
    layers: Any = None  # `kernels.cpu.jit.alike.PassLayers`, where some may follow from others
    final: Tensor | None = None  # [>= M, hidden_size], behind the final norm; until the next pass
    cached: CachePass | None = None  # the cache's part of the pass
    rotary: Sequence[tuple[Tensor, Tensor] | None] = ()  # cos and sin of each layer, if it rotates
    positions: Tensor | None = None  # of each row, on the device; of models that learn them
    per_layer: Tensor | None = None  # like hidden, [M, spec.per_layer_width]: `native.per_layer`
    cache_places: Sequence[Sequence[int]] = ()  # what each layer opens of caches; empty: its own
    chosen: Tensor | None = None  # int32 [M, spec.index.top], tokens that an index chose last
    hidden: Tensor | None = None  # [M, spec.hidden_width] of the layer at work
    active: Tensor | None = None  # [M, hidden_size], of several streams the one that it computes
    base: Tensor | None = None  # like active: what attention's output is added to in its place
    added: Mapping[str, LowRanks] = field(default_factory=dict)  # by adapters to that layer's

    @property
    def parts(self) -> Sequence[ForwardPass]:
        """Passes that attend, each to its cache: those that are joined, or this one."""
        return self.joined or (self,)

    def of_parts(self, x: Tensor) -> Sequence[Tensor]:
        """The rows of x that each part has."""
        return x.split([len(part.tokens) for part in self.joined]) if self.joined else (x,)

    def parted(self, logits: Tensor) -> Sequence[Tensor]:
        """The logits of each part."""
        rows = [part.logit_rows for part in self.joined]
        return logits.split([len(each) for each in rows if each is not None]) if rows else [logits]

    @property
    def input(self) -> Tensor:
        """What the layer at work computes from, [M, hidden_size]; else the hidden states."""
        found = self.hidden if self.active is None else self.active
        assert found is not None
        return found

    def kept(self, rows: Sequence[int] | None, attended: Tensor) -> Tensor:
        """Go on with these rows alone: see `keep`. Returns those of `attended`, its first ones."""
        self.keep(rows)
        return attended if rows is None else moved_up(attended, rows)

    def keep(self, rows: Sequence[int] | None) -> None:
        """Go on with these rows alone, ascending, in the place of the first ones; None: all."""
        if rows is None:
            return
        self.hidden, self.active, self.base, self.per_layer = (
            None if x is None else moved_up(x, rows)
            for x in (self.hidden, self.active, self.base, self.per_layer)
        )
        if self.workspace is not None:
            self.workspace = self.workspace.upto(len(rows))
        if self.adapters is not None:
            of, key = self.adapters, tuple(self.adapters.key[row] for row in rows)
            self.adapters = AdaptedRows(key, of.which[list(rows)], of.layers)

    def prefetch(self, unit: Unit) -> None:
        """Start to bring what the pass, under way, will want for a unit, weights aside."""
        self.prefetch_cache(unit)
        self.activations.prefetch()

    def prefetch_cache(self, unit: Unit) -> None:
        """Of what `prefetch` brings the part that is brought further ahead."""
        if isinstance(unit, int) and self.cached is not None:
            for place in self.cache_places[unit] if self.cache_places else (unit,):
                self.cached.prefetch(place)

    def abandon(self) -> None:
        """Give back what was taken in the cache, if the pass has not ended."""
        if self.cached is not None:
            self.cached.abandon()


def moved_up(x: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of x, ascending, written over its first ones: no memory is allocated."""
    for place, row in enumerate(rows):
        if place != row:
            x[place] = x[row]
    return x[: len(rows)]


def first_rows(memory: Tensor | None, rows: int) -> Tensor | None:
    """The first rows of memory, if there is any, or all of it."""
    return memory if memory is None or len(memory) <= rows else memory[:rows]


def columns(memory: Tensor | None, width: int, behind: int = 0) -> Tensor | None:
    """Working space of rows of at least this width as rows of it, one after the other.

    behind: leave the space of so wide rows to others.
    """
    if memory is None or memory.shape[1] == width:
        return memory
    first = len(memory) * behind
    return memory.flatten()[first : first + len(memory) * width].view(len(memory), width)


def mlp_tokens(tokens: int, tiled: bool, on_gpu: bool = False) -> int:
    """Tokens of which the MLP's intermediate values are kept at a time."""
    return tokens if tiled else min(tokens, GPU_MLP_TOKENS if on_gpu else MLP_TOKENS)


def per_layer_floats(spec: DecoderSpec) -> int:
    """Floats of a token that embeddings of layers take while one of these computes with them."""
    of = spec.per_layer
    return 0 if of is None else spec.per_layer_width + of.width + spec.hidden_size


def stream_floats(spec: DecoderSpec) -> int:
    """Floats of a token that streams take beside them: the active one twice, LAuReL, factors.

    At the end a stream, its projection, and what these are added up in.
    """
    of, hidden = spec.streams, spec.hidden_size
    if of is None:
        return 0
    return 3 * hidden + of.rank + 32 * of.count + of.count**2


def _extra_width(spec: DecoderSpec) -> int:
    """Floats of a token that a layer allocates: rows before their norm, sums not yet complete."""
    beside = spec.experts is not None and spec.experts.beside  # inputs of a router, two outputs
    return spec.hidden_size * (spec.parallel + (spec.post_norm or spec.norm_after_add) + 3 * beside)


def _experts_floats(spec: DecoderSpec, tokens: int, tiled: bool) -> int:
    """Floats that experts allocate: inputs, scores, values of each, those of the shared one.

    tiled: where they may come one by one, and what each gives a token is kept until all have come.
    """
    if spec.experts is None:
        return 0
    experts, hidden, width = spec.experts, spec.hidden_size, spec.expert_width
    some, together = min(tokens, MLP_TOKENS), mlp_tokens(tokens, tiled)
    inner = experts.intermediate_size * (3 if experts.gated else 2)
    each = inner + width + 3  # with an id and a weight
    floats = together * (hidden + experts.count + experts.shared_size + 1)
    floats += some * experts.top_k * each
    if tiled:
        gathered = min(tokens * experts.top_k, WAVE_PAIRS)
        return floats + _kept_floats(spec, tokens, tiled) + 2 * gathered * width
    return floats + (together + tokens) * spec.latent_width


def _kept_floats(spec: DecoderSpec, tokens: int, tiled: bool) -> int:
    """Floats that a pass keeps until its experts have all come: inputs, and what each gave.

    Of experts in a narrower space their sums, too.
    """
    if spec.experts is None or not tiled:
        return 0
    each = spec.hidden_size + 2 * spec.latent_width + spec.experts.shared_size
    return tokens * (each + spec.experts.top_k * (spec.expert_width + 8))
