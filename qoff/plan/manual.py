"""A plan made by hand, and the bytes it takes on each tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from qoff.budgets import MemorySize
from qoff.errors import ArgumentError, BudgetError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.states import state_bytes
from qoff.kernels.sampling import rows_together, sampling_bytes
from qoff.kvcache import KVQuant, PackedCache
from qoff.kvcache.device.plan import DeviceBlockPlans
from qoff.kvcache.drafted_states import drafted_bytes
from qoff.kvcache.groups import LayerGroup, layer_groups, one_group
from qoff.kvcache.host.recent import RecentTokens, RecentWorkspace
from qoff.kvcache.slots import PADDING
from qoff.kvcache.store.placement import DEVICE, DISK, HOST, KVPlacement, Tier
from qoff.kvcache.store.plan import BlockPlan, BlockPlans
from qoff.memory.activations import ActivationStore
from qoff.models.forward_pass import WAVE_PAIRS, LayerWorkspace
from qoff.models.native.pass_bytes import logits_bytes, recorded_bytes
from qoff.models.native.rope import table_bytes
from qoff.models.native.scratch import Passes, scratch_bytes
from qoff.models.spec import DecoderSpec
from qoff.schema import is_number, plain_int
from qoff.units import format_size


@dataclass(frozen=True)
class Plan:
    """How a throughput run uses the machine.

    Sequences of up to `context` tokens each, prompt and answer, in `batches` batches of
    `batch_size`; all batches go through a layer while its weights are on the device (schedule
    "block"), or one batch after the other through all layers ("sequential"). Memory bounds are in
    bytes or like "4GiB"; None: as much as it takes, and in host memory beside a bound of a GPU what
    is free. Weights use what else a bound leaves there. With share_prefixes a prompt that begins
    with 64 tokens or more of another one attends to their packed form instead of reading them,
    which is rounded; which prompts find one depends on what is computed when they are read.
    draft_tokens: of each answer, so many tokens are drafted from what it and its prompt have so far
    and go through one pass; those that the model chooses, too, need no passes of their own, which
    pays where a pass reads weights from disk or host memory. cpu_experts: on a GPU, experts of a
    mixture that stay in host memory are computed there by the CPU; cpu_expert_tokens: for passes of
    at most so many tokens, others bring them to the GPU (None: as is faster by the rates of the
    machine; as many as a pass may have: none comes).
    draft_model: a small model with the same tokenizer, which stays on the device and drafts them
    instead; "mtp": the model's own layer for multi-token prediction. least_prefill_tokens: a batch
    reads so many tokens of prompts in a pass, or twice, four times, ... as many, up to
    prefill_tokens, while each doubling makes a round at most half as long again by the rates of the
    machine; that is decided when the plan is opened (None: prefill_tokens). token_s: seconds
    between two tokens of a sequence at most. adapt: where rounds take longer or less long than
    expected, the schedule and how many sequences and prompts a round has follow what the machine
    does then, and where that pays, the running sequences end, and the rest goes on with another
    plan in the same memory; "rounds": without the latter. On a CPU no token depends on it without
    share_prefixes and prompt_logprobs. Raises ArgumentError for values out of range.
    """

    device_memory: MemorySize = MemorySize()  # noqa: RUF009
    host_memory: MemorySize = MemorySize()  # noqa: RUF009
    batch_size: int = 8
    batches: int = 1
    context: int = 2048
    prefill_tokens: int = 1024  # of prompts that a batch reads in one pass
    least_prefill_tokens: int | None = None  # the same where more would make rounds longer
    kv: KVQuant = field(default_factory=KVQuant)
    kv_placement: KVPlacement = field(default_factory=KVPlacement)
    cpu_attention: Literal["auto", "always", "never"] = "auto"
    cpu_experts: bool = False  # those in host memory are computed there
    cpu_expert_tokens: int | None = None  # of a pass, at most; else they come to the GPU
    activations: Tier = "device"
    schedule: Literal["block", "sequential"] = "block"
    share_prefixes: bool = False  # prompts that begin alike share packed blocks
    draft_tokens: int = 0  # drafted of an answer, at most; 0: a token a pass
    draft_model: str | None = None  # a checkpoint that drafts, or MTP; None: what came before does
    token_s: float | None = None
    adapt: bool | Literal["rounds"] = True
    slots: int = 2
    activation_bits: int = 16
    spill_folder: Path | None = None  # None: the system's folder for temporary files
    forgets: int = 0  # newest tokens of a sequence that may be forgotten again, beside drafts

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            value = plain_int(getattr(self, name))
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(f"{name} is {value!r}; use a whole number from {least}")
            object.__setattr__(self, name, value)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r}; use one of {', '.join(allowed)}"
                )
        for name, kind in (("kv", KVQuant), ("kv_placement", KVPlacement)):
            if not isinstance(getattr(self, name), kind):
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; use qoff.{kind.__name__}")
        if self.spill_folder is not None:
            object.__setattr__(self, "spill_folder", Path(self.spill_folder))
        for name in ("share_prefixes", "cpu_experts"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; use True or False")
        fewest = plain_int(self.least_prefill_tokens)
        if fewest is not None and (
            isinstance(fewest, bool) or not isinstance(fewest, int) or fewest < 1
        ):
            raise ArgumentError(
                f"least_prefill_tokens is {fewest!r}; use None or a whole number from 1"
            )
        object.__setattr__(self, "least_prefill_tokens", fewest)
        tokens = plain_int(self.cpu_expert_tokens)
        if tokens is not None:
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
                raise ArgumentError(
                    f"cpu_expert_tokens is {tokens!r}; use None or a whole number from 0"
                )
            if not self.cpu_experts:
                raise ArgumentError("cpu_expert_tokens needs cpu_experts: the CPU has none else")
        object.__setattr__(self, "cpu_expert_tokens", tokens)
        if not isinstance(self.adapt, bool) and self.adapt != "rounds":
            raise ArgumentError(f"adapt is {self.adapt!r}; use True, 'rounds' or False")
        if self.token_s is not None and not (is_number(self.token_s) and self.token_s > 0):
            raise ArgumentError(f"token_s is {self.token_s!r}; use seconds above 0")
        if self.share_prefixes and self.kv.sinks:
            raise ArgumentError("share_prefixes needs sinks=0: sink tokens belong to one sequence")
        if self.draft_model is not None:
            object.__setattr__(self, "draft_model", str(self.draft_model))
            if not self.draft_tokens:
                raise ArgumentError("draft_model needs draft_tokens: how many it drafts, at most")
        if self.draft_tokens and self.kv.attention_top < 1:
            raise ArgumentError(
                "draft_tokens needs attention_top=1: only single tokens attend to a part"
            )

    @property
    def blocks_per_sequence(self) -> int:
        """Packed blocks of a sequence of `context` tokens."""
        return PackedCache.blocks_of(self.context, self.kv.window, self.kv.sinks)

    def frees(self, on_gpu: bool) -> bool:
        """Whether blocks that lie behind the windows of their layers are free.

        They are kept where other prompts may begin with them (`share_prefixes`), and as the form of
        the cache says.
        """
        return not self.share_prefixes and self.kv.frees(on_gpu)

    def layer_groups(
        self, shapes: Sequence[HeadShape], on_gpu: bool = False
    ) -> tuple[LayerGroup, ...]:
        """The layers whose blocks come and go together.

        On a GPU those with windows have all of theirs there, wherever others are; where no layer
        sees all tokens and blocks are offloaded, all are kept.
        """
        if not self.frees(on_gpu):
            return one_group(shapes)
        found = layer_groups(shapes, self.draft_tokens + self.forgets, self.context)
        if on_gpu and found[0].reach and self.kv_placement.device_fraction < 1:
            return one_group(shapes)
        return found

    def block_plans(self, shapes: Sequence[HeadShape], forms: Sequence[KVFormat]) -> BlockPlans:
        """Sizes of the packed KV cache of all sequences, for a CPU."""
        groups = self.layer_groups(shapes)
        return BlockPlans(
            tuple((group, self._block_plan(group, shapes, forms)) for group in groups)
        )

    def _block_plan(
        self, group: LayerGroup, shapes: Sequence[HeadShape], forms: Sequence[KVFormat]
    ) -> BlockPlan:
        """Sizes of the packed KV cache of a group's layers."""
        size, window = self.batch_size, self.kv.window
        most, made = self.blocks_per_sequence if group.layers else 0, 0
        if group.reach:
            most = min(most, group.blocks_at_once(self.context, window))
            made = group.made_at_once(self.pass_tokens, size, window, self.context)
        one = self.kv_placement.capacity(most)
        more = {tier: self.batches * min(made, size * count) for tier, count in one.items()}
        sequences = self.batches * size
        moved = one[DISK] if self.attends_on_cpu else one[DISK] + one[HOST]
        kinds = [(shapes[layer].kv_heads, forms[layer]) for layer in group.layers]
        chooses = self.kv.attention_top < 1
        return BlockPlan(
            tuple(heads * form.nbytes for heads, form in kinds),
            {tier: count * sequences + more[tier] for tier, count in one.items()},
            sequences,
            size * moved,
            self.attends_on_cpu,
            choice_bytes=sum(heads for heads, _ in kinds) if chooses else 0,
            bound_bytes=tuple(heads * form.bound_bytes for heads, form in kinds) if chooses else (),
            lap=most if group.reach else 0,
        )

    @property
    def offloads(self) -> bool:
        """Whether a part of the KV cache, or hidden states, leave the device."""
        return self.kv_placement.device_fraction < 1 or self.activations != "device"

    @property
    def pass_tokens(self) -> int:
        """The most tokens of a pass."""
        return max(self.prefill_tokens, self.decode_tokens)

    @property
    def passing_from(self) -> int | None:
        """Tokens of a pass from which experts in host memory come to a GPU; None: of no pass."""
        most = self.cpu_expert_tokens
        return None if most is None or self.pass_tokens <= most else most + 1

    @property
    def decode_tokens(self) -> int:
        """The most tokens of a pass that decodes."""
        return self.batch_size * (1 + self.draft_tokens)

    @property
    def round_tokens(self) -> int:
        """The most tokens of a batch in a round: its newest ones, and some of its prompts."""
        return self.decode_tokens + self.prefill_tokens

    @property
    def tokens_of_passes(self) -> list[int]:
        """The most tokens of each pass of a round: each batch may decode, and read prompts."""
        return [self.decode_tokens, self.prefill_tokens] * self.batches

    def hidden_bytes(self, width: int, dtype: torch.dtype) -> dict[str, int]:
        """Bytes by tier of hidden states between units: prompts and new tokens of each batch."""
        if self.activations == "device":
            held = sum(self.tokens_of_passes) * width
            return {DEVICE: dtype.itemsize * held, HOST: 0, DISK: 0}
        return ActivationStore.bytes_for(self.activations, self.tokens_of_passes, width, dtype)

    def states_bytes(self, spec: DecoderSpec, dtype: torch.dtype) -> int:
        """Bytes of the device that recurrent layers remember of all sequences.

        dtype: of hidden states.
        """
        each, most = state_bytes(spec.state_shapes), self.draft_tokens
        if spec.state_shape is not None and most:
            layers = len(spec.state_shapes)
            each += drafted_bytes(spec.state_shape, layers, most, dtype.itemsize)
        return self.batches * self.batch_size * each

    @property
    def saved_states(self) -> int:
        """Recurrent states of beginnings of prompts that are kept, for others that begin alike.

        One for each sequence, and one of what several begin with.
        """
        return self.batches * self.batch_size + 1 if self.share_prefixes else 0

    def saved_states_bytes(self, spec: DecoderSpec) -> int:
        """Bytes of host memory of these."""
        return self.saved_states * state_bytes(spec.state_shapes)

    def logits_bytes(self, vocab_size: int) -> int:
        """Bytes of the logits of all passes of a round, beside those that are computed.

        With the tokens of each sequence, for its penalties.
        """
        each = self.decode_tokens * vocab_size + self.batch_size * self.context
        return 4 * self.batches * each

    def sampling_bytes(self, vocab_size: int, on_cpu: bool) -> int:
        """Bytes that choosing the tokens of a round takes, after all passes."""
        rows = self.batches * self.batch_size
        return sampling_bytes(vocab_size, rows, self.context, on_cpu)

    def passes(self, vocab_size: int, tiled: bool = False) -> Passes:
        """The largest passes, of which all but a prompt's are rows of a batch."""
        drawn = min(self.batches * self.decode_tokens, rows_together(vocab_size))
        return Passes(
            self.round_tokens,
            self.batch_size,
            PackedCache.recent_tokens(self.kv.window, self.kv.sinks) - 1,
            self.decode_tokens,
            max(self.batch_size, drawn),
            sum(self.kv_placement.capacity(self.blocks_per_sequence).values()),
            tiled=tiled,
            selects=self.kv.attention_top < 1,
            pairs=self.activation_bits < 16,
        )

    def tile_bytes(self, spec: DecoderSpec, dtype: torch.dtype) -> int:
        """Bytes of what each pass keeps between the parts of a layer, and one takes meanwhile."""
        kept = self.batches * sum(
            LayerWorkspace.nbytes(spec, tokens, True, dtype.itemsize, kept=True)
            for tokens in (self.prefill_tokens, self.decode_tokens)
        )
        if spec.experts is None:
            return kept
        pairs = min(self.pass_tokens * spec.experts.top_k, WAVE_PAIRS)
        return kept + 8 * pairs * spec.expert_width

    @property
    def attends_on_cpu(self) -> bool:
        """Whether host blocks are attended on the host instead of being moved.

        "auto" compares the bytes over the link: a query and its result against the blocks that
        they attend to, 64 tokens and more, so the query moves. On a GPU it is blocks on disk, too,
        that are attended on the host, and where many queries are read at once the CPU's arithmetic
        is what limits: with "auto", the blocks of a pass with more than `prefetch.MOVE_ROWS` (16)
        queries of a sequence for a KV head move to the GPU, if they are not more than one sequence
        has; that is what the plan has room for, where prompts are longer than `prefill_tokens` or
        share prefixes. With "never" all that a pass attends to moves there, with "always" none.
        """
        return self.cpu_attention != "never"


MTP = "mtp"  # the draft_model that is the model's own layer
_WHOLE = {  # and the least that each may be
    **dict.fromkeys(("batch_size", "batches", "context", "prefill_tokens", "slots"), 1),
    "activation_bits": 1,
    **dict.fromkeys(("draft_tokens", "forgets"), 0),
}
_CHOICES = {
    "cpu_attention": ("auto", "always", "never"),
    "activations": ("device", "host", "disk"),
    "schedule": ("block", "sequential"),
}


@dataclass(frozen=True)
class Memory:
    """Bytes that a plan takes beside the weights, by tier and purpose."""

    blocks: BlockPlans  # of a CPU
    purposes: dict[str, dict[str, int]]  # tier -> purpose -> bytes
    on_gpu: DeviceBlockPlans | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        spec: DecoderSpec,
        shapes: Sequence[HeadShape],
        tiled: bool = False,
        threads: int | None = None,
    ) -> Memory:
        """What a plan takes for a model on a CPU; tiled: whose layers stream in tiles.

        threads: that compute; None: those of this machine.
        """
        forms = plan.kv.packed_forms(shapes)
        blocks = plan.block_plans(shapes, forms)
        window = PackedCache.recent_tokens(plan.kv.window, plan.kv.sinks)
        recent = plan.batches * RecentTokens.bytes_for(shapes, plan.batch_size, window)
        unpacked = PADDING * plan.prefill_tokens + plan.batch_size * (window + 16)
        unpacked = min(unpacked, plan.batch_size * (plan.context + 16))
        prefill = max(RecentWorkspace.floats_for(shape, 1, unpacked) for shape in set(shapes))
        work = LayerWorkspace.nbytes(spec, plan.round_tokens) + 4 * prefill
        # What each pass of a round has of its own until its end.
        lent = sum(RecentWorkspace.floats_for(shapes[i], 1, unpacked) for i in spec.lent_layers)
        work += 4 * plan.batches * (1 + (plan.draft_tokens > 0)) * lent
        held = plan.batches * (plan.prefill_tokens + plan.decode_tokens)
        of_tokens = spec.per_layer_width + spec.chosen_width  # perhaps twice, for a recording
        work += 2 * 4 * held * of_tokens
        vocab, head = spec.vocab_size, logits_bytes(spec, plan.decode_tokens, torch.float32)
        hidden = plan.hidden_bytes(spec.hidden_width, torch.float32)
        # Tokens are chosen when hidden states on the device are free again.
        sampling = plan.sampling_bytes(vocab, on_cpu=True)
        sampling -= hidden[DEVICE] * (plan.activations == DEVICE)
        work += plan.logits_bytes(vocab) + max(head, sampling)
        work += recorded_bytes(spec, plan.batch_size, plan.batches)
        work += table_bytes(spec, plan.context + 1)
        work += scratch_bytes(spec, shapes, forms, plan.passes(vocab, tiled), threads)
        if tiled:
            work += plan.tile_bytes(spec, torch.float32)
            if spec.experts is None:  # which come one by one: such rounds are not recorded
                work += plan.batches * LayerWorkspace.nbytes(spec, plan.batch_size, True)
        kv = {tier: {"KV blocks": nbytes} for tier, nbytes in blocks.tier_bytes().items()}
        purposes = by_purpose(kv, recent, hidden, {DEVICE: work})
        if spec.recurrent is not None:
            states = plan.states_bytes(spec, torch.float32) + plan.saved_states_bytes(spec)
            purposes[DEVICE]["states"] = states
        return cls(blocks, purposes)

    def beside(self, purposes: Mapping[str, int], tier: str = DEVICE) -> Memory:
        """The same with more on a tier, by purpose."""
        return replace(self, purposes={**self.purposes, tier: {**self.purposes[tier], **purposes}})

    def total(self, tier: str) -> int:
        """Bytes on a tier."""
        return sum(self.purposes[tier].values())

    def left(self, tier: str, budget: int | None, least: int | None = None) -> int | None:
        """What a budget leaves for weights. Raises BudgetError when it is too small.

        least: bytes of a budget with which the model can be opened, if known.
        """
        if budget is None:
            return None
        if self.total(tier) > budget:
            parts = ", ".join(
                f"{name} {format_size(nbytes)}"
                for name, nbytes in self.purposes[tier].items()
                if nbytes
            )
            enough = "" if least is None else f"raise the budget to at least {least:,}, "
            error = BudgetError(
                f"{tier} memory: {self.total(tier):,} bytes are needed beside the weights "
                f"({parts}), and the budget is {budget:,}; {enough}use fewer or shorter sequences, "
                "or move the KV cache or the activations to another tier"
            )
            error.least = least
            raise error
        return budget - self.total(tier)


def by_purpose(
    kv: Mapping[str, Mapping[str, int]],
    recent: int,
    hidden: Mapping[str, int],
    work: Mapping[str, int],
) -> dict[str, dict[str, int]]:
    """Bytes by tier and purpose. kv: those of the packed cache; recent: of K and V not packed."""
    return {
        tier: {
            **kv[tier],
            "recent KV": recent if tier == DEVICE else 0,
            "hidden states": hidden[tier],
            "working space": work.get(tier, 0),
        }
        for tier in (DEVICE, HOST, DISK)
    }
