"""A qoff model with the interface of a transformers causal language model."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PretrainedConfig,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from qoff.dynamo import uncompiled
from qoff.errors import ClosedError, OpError, QoffError
from qoff.kernels.torch_threads import one_torch_thread
from qoff.models.forward_pass import NOT_FINITE, ForwardPass
from qoff.models.runtime import Runtime, RuntimeStats
from qoff.system_memory import refusals

from .budget import Budget
from .cache import CACHE, QoffCache
from .decoding import Decoding, Ends, TokenChoice, is_plain
from .padded_batch import PaddedBatch
from .placed import PlacedModel


class QoffModelConfig(PretrainedConfig):
    """The key of `QoffForCausalLM` in transformers' registry; models have the config of theirs."""

    model_type = "qoff"


class QoffForCausalLM(PlacedModel, GenerationMixin):
    """Runs a qoff checkpoint behind `forward` and `generate`.

    It holds no torch parameters: the weights belong to `runtime`. Logits are float32, on the device
    of the token ids. budget: what bounds its memory; None: nothing does.
    """

    config_class = QoffModelConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _is_stateful = False

    def __init__(
        self, config: PretrainedConfig, runtime: Runtime, budget: Budget | None = None
    ) -> None:
        super().__init__(config)
        self.runtime = runtime
        self.budget = budget
        self._closed = False

    def stats(self) -> RuntimeStats:
        """Return what was read, waited for and allocated so far."""
        return self.runtime.stats()

    def close(self) -> None:
        """Give back memory, threads and files; the model cannot be used afterwards.

        It happens by itself when nothing refers to the model any more, or at the end of a `with`.
        """
        self._closed = True
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @uncompiled  # dynamo would break the graph at every op, for minutes
    @refusals()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        past_key_values: Cache | None = None,
        **unsupported: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """One forward pass over int64 ids [B, T], padded on one side as attention_mask says.

        attention_mask: [B, columns in the cache + T], or None where nothing is padded. Returns
        logits float32 [B, T or logits_to_keep, vocab_size], zero at padding, but with
        logits_to_keep=1 those of each row's last token; and the cache. A model with a bound of
        memory reads a prompt that has no room in one pass in pieces; with a packed cache, later
        pieces attend to packed tokens, which rounds. Raises OpError for what cannot be
        done (embeddings as input, hidden states or attention weights as output, another kind of
        cache) and BudgetError for what the bound has no room for, before anything is computed;
        QoffError for logits that are not finite, of which `generate` would make token 0 for ever.
        num_items_in_batch: the loss is a sum, divided by it; None: a mean. past_key_values: `cache`
        as transformers before 5.24 calls it.
        """
        self._check_open()
        for name in _IN_TORCH:
            unsupported.setdefault(name, getattr(self.config, name, None))
        self._refuse(unsupported)
        if input_ids is None or input_ids.dim() != 2 or input_ids.is_floating_point():
            given = None if input_ids is None else f"{input_ids.dtype} {list(input_ids.shape)}"
            raise OpError(f"input_ids must be whole numbers [batch, tokens], not {given}")
        batch, width = input_ids.shape
        device, input_ids = input_ids.device, input_ids.cpu()
        if attention_mask is not None:
            attention_mask = attention_mask.cpu()
        if cache is not None and past_key_values is not None:
            raise OpError("cache and past_key_values are the same: give one of them")
        cache = past_key_values if cache is None else cache
        cache = QoffCache(self, batch) if cache is None else cache
        if not isinstance(cache, QoffCache):
            raise OpError(
                "the cache must come from a qoff model or be a qoff.QoffCache, not a "
                f"{type(cache).__name__}"
            )
        cache.prepare(self.runtime.decoder.cache_shapes, batch)
        columns = PaddedBatch.of(
            (batch, width), attention_mask, cache.tokens.lengths, cache.columns
        )
        columns.check_positions(None if position_ids is None else position_ids.cpu())
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise OpError("logits_to_keep must be how many of the last columns, not which ones")
        rows, places = columns.logit_rows(logits_to_keep)
        kept = min(logits_to_keep, width) if logits_to_keep else width
        tokens = columns.tokens(input_ids)
        returned, room = batch * kept, None  # `generate` makes copies, but not of all columns
        if not logits_to_keep:
            # The head's, which torch allocates twice for a moment, then padded, and in the loss.
            copied = returned * ((len(rows) < returned) + (labels is not None))
            room = len(rows) + max(len(rows), copied)
        logits = found = self._read(tokens, columns, cache, rows, returned, room).to(device)
        cache.add(columns)
        if found.numel() and not math.isfinite(found.amax()):  # NaN if one is
            raise QoffError(f"{self.runtime.checkpoint.path}: {NOT_FINITE}")
        if len(rows) < returned:
            logits = torch.zeros(returned, found.shape[1], device=device)
            logits[places.to(device)] = found
        logits, loss = logits.view(batch, kept, -1), None
        if labels is not None:
            loss = self.loss_function(
                logits,
                labels,
                vocab_size=logits.shape[-1],
                num_items_in_batch=num_items_in_batch,
            )
        held: dict[str, Any] = {CACHE: cache if use_cache is not False else None}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **held)
        return output if return_dict is not False else output.to_tuple()

    def _read(
        self,
        tokens: Tensor,
        columns: PaddedBatch,
        cache: QoffCache,
        rows: Tensor,
        returned: int,
        room: int | None,
    ) -> Tensor:
        """Read a batch, in pieces where memory is bounded; float32 logits [R, vocab] of `rows`.

        returned: rows of logits that become of these, padding included. room: rows that are there
        at once, see `QoffCache.make_room`.
        """
        ragged = columns.ragged
        counts = [span.count for span in ragged.spans]
        at_once = cache.make_room(ragged.longest + 1, counts, returned, room)
        if at_once == max(counts):
            return self.runtime.forward(ForwardPass(tokens, ragged, cache.tokens, rows))
        before, found = list(cache.tokens.lengths), torch.empty(0, 0)
        try:
            for part, piece in columns.pieces(at_once):
                wanted = (part[:, None] == rows).nonzero()  # [m, 2]: row of the piece, of logits
                run = ForwardPass(tokens[part], piece, cache.tokens, wanted[:, 0])
                logits = self.runtime.forward(run)
                if not found.shape[1]:
                    found = logits.new_empty(len(rows), logits.shape[1])
                found[wanted[:, 1].to(found.device)] = logits
        except BaseException:  # a retry reads the prompt from its beginning
            done = [now - was for now, was in zip(cache.tokens.lengths, before, strict=True)]
            cache.tokens.undo(done)
            raise
        return found

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, with torch's own operations on one thread meanwhile.

        Where memory is bounded, it waits until there is room beside the calls of other threads.
        The cache may be given by any version's name, `cache` or `past_key_values`.
        """
        self._check_open()
        for name in {"cache", "past_key_values"} - {CACHE}:
            if name in kwargs and CACHE not in kwargs:
                kwargs[CACHE] = kwargs.pop(name)
        with one_torch_thread(), nullcontext() if self.budget is None else self.budget.turns.call():
            return cast(Any, super()).generate(*args, **kwargs)  # typed for their own models

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """transformers' hook: its loop of one token after another, or `decoding`'s."""
        given: Any = (input_ids, logits_processor, stopping_criteria, generation_config)
        if self._is_changed or not is_plain(
            input_ids, generation_config, synced_gpus, model_kwargs
        ):
            sample: Any = super()._sample  # type: ignore[misc]  # typed for their own models
            return sample(*given, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)
        prefill: Any = self._prefill  # type: ignore[misc]
        logits = prefill(input_ids, generation_config, model_kwargs).logits[:, -1]
        pad = generation_config._pad_token_tensor
        decoding = Decoding(
            self.runtime,
            model_kwargs[CACHE],
            TokenChoice(logits_processor, bool(generation_config.do_sample)),
            Ends(stopping_criteria),
            None if pad is None else int(pad),
            streamer,
        )
        return decoding.run(input_ids, logits)

    def _get_stopping_criteria(
        self, generation_config: GenerationConfig, *given: Any, **options: Any
    ) -> Any:
        """transformers' hook. Raises OpError where a model that drafts would look at no scores."""
        config = generation_config
        scored = config.return_dict_in_generate and config.output_scores
        if config.is_assistant and config.assistant_confidence_threshold and not scored:
            raise OpError(
                "is_assistant=True is what generate itself tells a model that drafts for another; "
                "leave it out, and give that other one this model as assistant_model"
            )
        found: Any = super()._get_stopping_criteria  # type: ignore[misc]
        return found(generation_config, *given, **options)

    def _get_candidate_generator(
        self, generation_config: GenerationConfig, *given: Any, **options: Any
    ) -> Any:
        """transformers' hook. Raises OpError for what takes layers out of torch's modules."""
        if generation_config.assistant_early_exit is not None:
            raise OpError(
                "generate does not support assistant_early_exit; give an assistant_model, or use "
                f"{self._in_torch}"
            )
        if getattr(generation_config, "use_mtp", None):
            raise OpError(
                "generate does not support use_mtp; qoff.LLM does, with draft_model='mtp' and "
                f"draft_tokens; or give an assistant_model, or use {self._in_torch}"
            )
        made: Any = super()._get_candidate_generator  # type: ignore[misc]
        return made(generation_config, *given, **options)

    def heal_tokens(self, input_ids: Any, tokenizer: Any = None) -> Any:
        """transformers' hook, which tokenizes prompts anew: int64 [B, T] again.

        Raises OpError where that gives another shape, as it drops special tokens and outer spaces:
        attention_mask and positions are those of the ids that were given.
        """
        healed = super().heal_tokens(input_ids, tokenizer)
        if healed.shape != input_ids.shape:
            raise OpError(
                f"token_healing makes {list(healed.shape)} tokens of {list(input_ids.shape)}: it "
                "takes prompts without special tokens and without spaces at their ends; leave them "
                "out, or token_healing"
            )
        return healed

    @property
    def _is_changed(self) -> bool:
        """Whether a forward pass is more than `forward`: hooks, or another one in its place."""
        own = type(self).forward is QoffForCausalLM.forward and "forward" not in vars(self)
        return bool(not own or self._forward_hooks or self._forward_pre_hooks)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """transformers' hook; speculative decoding and prefill in chunks want a cache from here."""
        prepared = super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if not generation_config.use_cache:
            return prepared
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        cache, rows = model_kwargs.get(CACHE), batch_size * copies

        def made() -> QoffCache:
            found = QoffCache(self, rows, keeps=False) if cache is None else cache
            found.prepare(self.runtime.decoder.cache_shapes, rows)
            found.make_room(max_cache_length, [1] * rows, rows)
            return found

        if cache is None and self.budget is not None:
            model_kwargs[CACHE] = self.budget.turns.when_room(made)
        elif cache is None or isinstance(cache, QoffCache):
            model_kwargs[CACHE] = made()
        return prepared

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a cache of our own is made instead

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the model is closed; load it again")
        self.runtime.store.check_process()

    def _refuse(self, options: dict[str, Any]) -> None:
        """Raise OpError for an argument that was given and would change the result."""
        for name, value in options.items():
            if value is None or value is False or name in _HARMLESS:
                continue
            given = value if isinstance(value, bool | int | str) else f"a {type(value).__name__}"
            way = "leave it out"
            if name in _IN_TORCH:
                way += f", or use {self._in_torch}"
            raise OpError(f"forward does not support {name}={given}; {way}")


AutoModelForCausalLM.register(QoffModelConfig, QoffForCausalLM)  # pipelines then know the class

_IN_TORCH = ("output_hidden_states", "output_attentions")  # what its own modules can do

# What transformers passes on to every model, `tokenizer` for stop strings.
_HARMLESS = {"cache_position", "tokenizer"}
