"""What a bounded model may take of its device beside the weights: KV caches and working space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from qoff.errors import BudgetError
from qoff.kernels.cpu.sampling.scratch import sampling_bytes as sampling_scratch
from qoff.kvcache import KVCache, KVQuant, PackedCache, PassingCache
from qoff.kvcache.host.recent import PACKING, RecentWorkspace
from qoff.models.forward_pass import MLP_TOKENS, LayerWorkspace
from qoff.models.modules import pass_bytes
from qoff.models.modules.cache import ModuleCache
from qoff.models.modules.decoder import ModuleDecoder
from qoff.models.native.decoder import Decoder
from qoff.models.native.pass_bytes import logits_bytes, recorded_bytes
from qoff.models.native.rope import table_bytes
from qoff.models.native.scratch import Passes, scratch_bytes
from qoff.models.runtime import AnyDecoder, Runtime
from qoff.plan import Plan
from qoff.process import ForkLock
from qoff.units import format_size

from .turns import OtherCachesError, Turns

_CONTEXTS = (2048, 1024, 512, 256)
_PASSES = (MLP_TOKENS, 256, 128, 64, 32, 16)
_LOGITS = 4  # copies: the model's, scaled or padded, and those that `generate` makes
COMPARED_ROWS = 16  # of logits, of which values are computed that are compared
_COMPARED, _SCORED = 2, 12  # copies of these; where they are scored, in float64


class BoundedCache(Protocol):
    """What a budget knows of a cache: what holds its tokens, and for how many it has made room."""

    tokens: KVCache
    room: int  # tokens of each sequence

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Scoring:
    """Passes whose logits are all wanted: tokens of each sequence."""

    tokens: int


@dataclass(frozen=True)
class Room:
    """What is read together: sequences of a batch, tokens of each in a pass, batches."""

    sequences: int
    pass_tokens: int
    batches: int = 1


class Budget:
    """Bounds everything on the device: weights, KV caches, activations, logits, working space.

    memory: the bound in bytes. Beside the weights room is kept for a KV cache of `batch_size`
    sequences of `context` tokens, and for passes of 16 tokens, or of up to 512 in an eighth of the
    memory. context None: as many tokens as the model takes, at most 2048, and fewer (at least 256)
    where they would want more than a quarter of the memory. What of this and of the plan for the
    weights is free is for any sequences and passes that fit. scoring: passes to make room for
    instead of these.
    """

    def __init__(
        self,
        memory: int,
        context: int | None,
        batch_size: int,
        kv: KVQuant | None,
        scoring: Scoring | None = None,
    ) -> None:
        self.memory = memory
        self.context, self.batch_size = context, batch_size
        self.free = 0  # bytes beside the weights
        self._kv, self._scoring = kv, scoring
        self._tiled = False
        self._largest = 0  # sequences of a batch so far: recordings of its steps stay
        self._decoder: AnyDecoder | None = None
        self._caches: WeakSet[BoundedCache] = WeakSet()
        self._steps: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # work of one, of each
        self._turn = ForkLock()
        self.turns = Turns(self._forget)

    def choices(self, decoder: AnyDecoder) -> Iterator[tuple[int, int]]:
        """Bytes to keep free beside the weights, without and with layers in tiles; best first."""
        size = self.batch_size

        def cache_bytes(context: int) -> int:
            return size * decoder.new_cache(1, kv=self._kv).bytes_for(context)

        def work(tokens: int, context: int, tiled: bool) -> int:
            count = max(1, min(tokens, size * context) // size)
            rows, logits = size, None
            if self._scoring is not None:
                rows = size * count
                logits = rows + max(rows, _SCORED * min(rows, COMPARED_ROWS))
            return working_bytes(
                decoder, self._kv, size, count, rows, context, tiled, bound=self.memory,
                logits=logits,
            )  # fmt: skip

        longest = min(decoder.max_positions, _CONTEXTS[0])
        contexts = [longest, *(c for c in _CONTEXTS if c < longest)]
        if self.context is not None:
            contexts = [self.context]
        context = next((c for c in contexts if 4 * cache_bytes(c) <= self.memory), contexts[-1])
        passes = [tokens for tokens in _PASSES if 8 * work(tokens, context, False) <= self.memory]
        sizes = [(context, t) for t in (*passes, _PASSES[-1])] + [(contexts[-1], _PASSES[-1])]
        if self._scoring is not None:
            sizes = [(context, self._scoring.tokens * size)]
        for length, tokens in dict.fromkeys(sizes):
            cache = cache_bytes(length)
            yield cache + work(tokens, length, False), cache + work(tokens, length, True)

    def settle(self, runtime: Runtime) -> None:
        """Take what the plan for the weights has left."""
        plan, decoder = runtime.residency, runtime.decoder
        self._decoder = decoder
        self._tiled = plan.in_parts
        outer = decoder.outer_bytes if isinstance(decoder, ModuleDecoder) else 0
        self.free = self.memory - plan.device_weight_bytes - outer

    def admit(
        self,
        cache: BoundedCache,
        tokens: int,
        counts: Sequence[int],
        rows: int,
        logits: int | None = None,
    ) -> int:
        """Make room in a cache for `tokens` tokens of each sequence, beside a pass.

        counts: new tokens of each sequence. rows, logits: as in `working_bytes`; of a pass in
        pieces, a piece's are copied. Returns how many new tokens of each fit into one pass. Raises
        BudgetError naming the bytes wanted and there, OtherCachesError if there will be enough
        without other caches.
        """
        with self._turn:
            running = self.turns.running()
            beside = 0 if cache in running else max(map(self._step, running), default=0)
            at_once = self._fitting(cache, tokens, counts, rows, logits, beside)
            self._largest = max(self._largest, len(counts))
            self._caches.add(cache)
            if tokens > cache.room:
                grown = tokens + tokens // 2  # for passes to come
                work = max(beside, self._pass(counts, at_once, rows, grown, logits))
                wanted = self._others(cache) + cache.tokens.bytes_for(grown) + work
                cache.room = grown if wanted <= self.free else tokens
                cache.tokens.reserve(cache.room)
                self._steps[cache] = self._pass(counts, 1, len(counts), cache.room)
            return at_once

    def _fitting(
        self,
        cache: BoundedCache,
        tokens: int,
        counts: Sequence[int],
        rows: int,
        logits: int | None,
        beside: int,
    ) -> int:
        """How many new tokens of each sequence fit into one pass; see `admit`.

        beside: bytes of the largest step of those that run.
        """
        held, others = cache.tokens, self._others(cache)
        wanted, at_once = held.bytes_for(tokens), max(counts)
        whole = isinstance(held, ModuleCache) and (held.recurrent or len(set(counts)) > 1)
        while True:
            own = self._pass(counts, at_once, rows, tokens, logits)
            work = max(beside, own)
            if others + wanted + work <= self.free:
                return at_once
            if at_once == 1 or whole:
                break
            at_once = -(-at_once // 2)
        kept = f" beside {others:,} of other caches" if others else ""
        raise (OtherCachesError if wanted + own <= self.free else BudgetError)(
            f"device memory: a KV cache of {len(counts)} x {tokens} tokens wants "
            f"{wanted:,} bytes{kept} and a pass {work:,}, but {self.free:,} of "
            f"{self.memory:,} are there beside the weights; use fewer or shorter "
            "sequences, or load the model with more device_memory, or with the context "
            "and batch_size that it is to have"
        )

    def scored_at_once(self, sequences: int, tokens: int, most: int, predicted: int) -> Room:
        """How many sequences, and tokens of each, are read in a pass, and in how many batches.

        At most as many sequences and tokens as given; each has `tokens` tokens in the end, of which
        `predicted` are. Batches share a layer's working space. Raises BudgetError where there is no
        room for one token of one sequence.
        """
        decoder, most = self._decoder, min(most, tokens)
        assert decoder is not None
        while True:
            cache = decoder.new_cache(sequences, kv=self._kv).bytes_for(tokens)
            rows = sequences * min(most, predicted)
            logits = rows + max(rows, _COMPARED * min(rows, COMPARED_ROWS))
            work = self._pass([most] * sequences, most, rows, tokens, logits)
            if cache + work <= self.free:
                more = 0
                native = isinstance(decoder, Decoder) and decoder
                # What is resident is not read, and a batch for itself is done earlier.
                if native and not native.caches_on_device and not native.resident:
                    shared = LayerWorkspace.nbytes(native.spec, sequences * most)
                    shared += shared_bytes(native, self._kv, sequences, most, rows, tokens)
                    more = (self.free - cache - work) // (cache + work - shared)
                return Room(sequences, most, 1 + more)
            if sequences > 1:
                sequences = -(-sequences // 2)
            elif most > 1:
                most = -(-most // 2)
            else:
                raise BudgetError(
                    f"device memory: scoring {tokens} tokens wants {cache + work:,} bytes, but "
                    f"{self.free:,} of {self.memory:,} are there beside the weights; use a smaller "
                    "max_length or more device_memory"
                )

    def reads_at_once(self, tokens: int, rows: int, sequences: int, longest: int) -> bool:
        """Whether there is room to read sequences once, in two passes of a round at most.

        tokens, rows of logits: of all; sequences: of a pass; longest: tokens of one. A layer's keys
        and values are in a `PassingCache` for each pass. On a CPU, by the native decoder.
        """
        decoder = self._decoder
        assert isinstance(decoder, Decoder)
        each = -(-tokens // sequences)
        logits = rows + _COMPARED * min(rows, COMPARED_ROWS)
        work = working_bytes(
            decoder, None, sequences, each, rows, longest, self._tiled, bound=self.memory,
            logits=logits,
        )  # fmt: skip
        work += 2 * PassingCache.bytes_for(decoder.head_shapes, sequences, longest)
        return self._others(None) + work <= self.free

    def count(self, cache: BoundedCache) -> None:
        """Count the memory of a cache from now on, as long as it is there."""
        with self._turn:
            self._caches.add(cache)

    @contextmanager
    def rows(self, cache: BoundedCache, sequences: int) -> Iterator[None]:
        """A cache comes to have so many sequences meanwhile. Raises BudgetError if too many."""
        with self._turn:
            held, others = cache.tokens, self._others(cache)
            wanted = held.nbytes * sequences // max(1, held.sequences)
            more = sequences > held.sequences or cache not in self._caches
            if more and wanted + others > self.free:
                raise BudgetError(
                    f"device memory: a KV cache of {sequences} sequences wants {wanted:,} bytes, "
                    f"and others have {others:,}, but {self.free:,} of {self.memory:,} are there "
                    "beside the weights; use fewer sequences or more device_memory"
                )
            yield

    def _step(self, cache: object) -> int:
        return self._steps.get(cache, 0)

    def _forget(self, cache: object) -> None:
        with self._turn:
            self._caches = WeakSet(one for one in self._caches if one is not cache)

    def _others(self, cache: BoundedCache | None) -> int:
        """What other caches hold, and those of calls that run will hold."""
        running, total = self.turns.running(), 0
        for one in self._caches:
            if one is not cache:
                more = one.tokens.bytes_for(one.room) if one in running else 0
                total += max(one.nbytes, more)
        return total

    def __str__(self) -> str:
        return (
            f"{format_size(self.memory)} bound everything, {format_size(self.free)} of them for "
            "KV caches and working space"
        )

    def _pass(
        self,
        counts: Sequence[int],
        at_once: int,
        rows: int,
        longest: int,
        logits: int | None = None,
    ) -> int:
        assert self._decoder is not None
        sequences = len(counts)
        rows = max(rows, sequences)
        if logits is not None and at_once < max(counts):
            logits += min(rows, sequences * at_once)
        return working_bytes(
            self._decoder,
            self._kv,
            sequences,
            at_once,
            rows,
            longest,
            self._tiled,
            self._largest,
            bound=self.memory,
            logits=logits,
        )


def working_bytes(
    decoder: AnyDecoder,
    kv: KVQuant | None,
    sequences: int,
    count: int,
    rows: int,
    longest: int,
    tiled: bool,
    largest: int = 0,
    *,
    bound: int | None = None,
    logits: int | None = None,
) -> int:
    """The most bytes that a pass takes beside weights and KV cache, its logits included.

    The pass reads `count` tokens of each sequence, the longest of which then has `longest`, for
    `rows` rows of logits; tiled: layers stream in tiles. largest: sequences of a pass before.
    bound: bytes of the device that may be used in all, None for all of it. logits: rows that are
    there at once, copies included, None: what `generate` makes of each row. For models that run
    through transformers' modules it is an estimate.
    """
    if isinstance(decoder, ModuleDecoder):
        vocab = decoder.vocab_size
        shared = max(
            pass_bytes.scratch_bytes(decoder, sequences, count, longest),
            sampling_scratch(vocab, sequences, of_torch=True),
        )
        work = pass_bytes.working_bytes(decoder, sequences, count, longest)
        return work + shared + 4 * _LOGITS * rows * vocab
    spec, tokens = decoder.spec, sequences * count
    if decoder.caches_on_device:
        assert kv is not None
        from qoff.plan.gpu import memory_on_gpu

        options: dict[str, Any] = {"device_memory": bound, "batch_size": sequences, "kv": kv}
        # One pass at a time: nothing is dequantized for others.
        plan = Plan(**options, context=longest, prefill_tokens=tokens, schedule="sequential")
        device, dtype = decoder.device, decoder.dtype
        recorded = 0 if decoder.replays is None else max(sequences, largest)
        memory = memory_on_gpu(plan, spec, decoder.head_shapes, device, dtype, tiled, recorded)
        needed, extra = memory.purposes["device"], max(0, (logits or rows) - sequences)
        more = logits_bytes(spec, extra, dtype) + 8 * extra * spec.hidden_size
        return needed["working space"] + needed["hidden states"] + more
    work = LayerWorkspace.nbytes(spec, tokens) + (
        LayerWorkspace.nbytes(spec, tokens, True) if tiled else 0
    )
    of_tokens = spec.hidden_width + spec.per_layer_width + spec.chosen_width
    work += 8 * tokens * of_tokens + table_bytes(spec, longest)
    if decoder.replays is not None:
        steps = max(sequences, largest)
        work += LayerWorkspace.nbytes(spec, steps) + recorded_bytes(spec, steps)
        work += LayerWorkspace.nbytes(spec, steps, True) if tiled else 0
    all_logits = _LOGITS * rows if logits is None else max(logits, _LOGITS * sequences)
    work += 4 * (all_logits * spec.vocab_size + 2 * rows * spec.hidden_size)
    work += shared_bytes(decoder, kv, sequences, count, rows, longest, tiled, largest)
    if kv is not None:  # a layer's unpacked tokens, and those of them that a pass packs
        unpacked = count + kv.window + kv.sinks + 2 * 64
        each = [RecentWorkspace.floats_for(shape, 1, unpacked) for shape in decoder.head_shapes]
        work += 4 * max(each) * (sequences + PACKING)
        work += 4 * sequences * sum(each[i] for i in spec.lent_layers)
    return work


def shared_bytes(
    decoder: Decoder,
    kv: KVQuant | None,
    sequences: int,
    count: int,
    rows: int,
    longest: int,
    tiled: bool = False,
    largest: int = 0,
) -> int:
    """What the ops of such a pass, or of one that decodes, share on a CPU."""
    shapes = decoder.head_shapes
    forms = [None] * len(shapes) if kv is None else kv.forms(shapes)
    place, blocks = longest - 1, 0
    if kv is not None:
        blocks = PackedCache.blocks_of(longest, kv.window, kv.sinks)
        if None not in forms:
            place = PackedCache.recent_tokens(kv.window, kv.sinks) - 1
    together = max(sequences, largest)
    passes = Passes(
        sequences * count,
        together,
        place,
        max(rows, together),
        together,
        blocks,
        of_torch=True,
        tiled=tiled,
        selects=kv is not None and kv.attention_top < 1,
    )
    return scratch_bytes(decoder.spec, shapes, forms, passes)
