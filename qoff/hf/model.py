"""A qoff model with the interface of a transformers causal language model."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from qoff.errors import OpError, QoffError
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.decoder import ModuleDecoder
from qoff.models.runtime import Runtime, RuntimeStats

from .cache import QoffCache
from .padded_batch import PaddedBatch
from .torch_threads import one_torch_thread


class QoffModelConfig(PretrainedConfig):
    """The key of `QoffForCausalLM` in transformers' registry; models have the config of theirs."""

    model_type = "qoff"


class QoffForCausalLM(PreTrainedModel, GenerationMixin):
    """Runs a qoff checkpoint behind `forward` and `generate`.

    It holds no torch parameters: the weights belong to `runtime`. Logits are float32 on the CPU.
    """

    config_class = QoffModelConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _is_stateful = False

    def __init__(self, config: PretrainedConfig, runtime: Runtime) -> None:
        super().__init__(config)
        self.runtime = runtime

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def stats(self) -> RuntimeStats:
        """Return what was read, waited for and allocated so far."""
        return self.runtime.stats()

    def close(self) -> None:
        """Give back memory, threads and files; the model cannot be used afterwards.

        It happens by itself when nothing refers to the model any more, or at the end of a `with`.
        """
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **unsupported: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """One forward pass over int64 ids [B, T], padded on one side as attention_mask says.

        attention_mask: [B, columns in the cache + T], or None where nothing is padded.
        Returns logits float32 [B, T or logits_to_keep, vocab_size] (zero at padding), and the cache
        as `past_key_values`. Raises OpError for what cannot be done: embeddings as input, hidden
        states or attention weights as output, another kind of cache.
        """
        _refuse(unsupported)
        if input_ids is None or input_ids.dim() != 2 or input_ids.is_floating_point():
            given = None if input_ids is None else f"{input_ids.dtype} {list(input_ids.shape)}"
            raise OpError(f"input_ids must be whole numbers [batch, tokens], not {given}")
        batch, width = input_ids.shape
        cache = self._cache(past_key_values, batch)
        columns = PaddedBatch.of(
            (batch, width), attention_mask, cache.tokens.lengths, cache.columns
        )
        columns.check_positions(position_ids)
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise OpError("logits_to_keep must be how many of the last columns, not which ones")
        rows, places = columns.logit_rows(logits_to_keep)
        found = self.runtime.forward(
            ForwardPass(columns.tokens(input_ids), columns.ragged, cache.tokens, rows)
        ).cpu()
        cache.add(columns)
        kept = min(logits_to_keep, width) if logits_to_keep else width
        if len(rows) == batch * kept:
            logits = found.view(batch, kept, -1)
        else:
            logits = torch.zeros(batch * kept, found.shape[1])
            logits[places] = found
            logits = logits.view(batch, kept, -1)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache if use_cache is not False else None
        )
        return output if return_dict is not False else output.to_tuple()

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, with torch's own operations on one thread meanwhile."""
        with one_torch_thread():
            generate: Any = super().generate  # type: ignore[misc]  # typed for their own models
            return generate(*args, **kwargs)

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
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            copies = max(
                generation_config.num_beams or 1, generation_config.num_return_sequences or 1
            )
            model_kwargs["past_key_values"] = QoffCache(self, batch_size * copies)
        return prepared

    def _cache(self, given: Cache | None, batch: int) -> QoffCache:
        if given is None:
            return QoffCache(self, batch)
        if not isinstance(given, QoffCache):
            raise OpError(
                "past_key_values must come from a qoff model or be a qoff.QoffCache, not a "
                f"{type(given).__name__}"
            )
        given.prepare(self.runtime.decoder.head_shapes, batch)
        return given

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a cache of our own is made instead

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: the weights are a checkpoint on disk already."""
        raise QoffError(
            f"nothing to save: the model is the directory {self.runtime.checkpoint.path}; copy it"
        )


def _refuse(options: dict[str, Any]) -> None:
    """Raise OpError for an argument that was given and would change the result."""
    for name, value in options.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        given = value if isinstance(value, bool | int | str) else f"a {type(value).__name__}"
        raise OpError(f"forward does not support {name}={given}; leave it out")


AutoModelForCausalLM.register(QoffModelConfig, QoffForCausalLM)  # pipelines then know the class

# What transformers passes on to every model, `tokenizer` for stop strings.
_HARMLESS = {"cache_position", "num_items_in_batch", "tokenizer"}


def build(runtime: Runtime, config: PretrainedConfig, generation: GenerationConfig | None) -> Any:
    """Return the model for an opened checkpoint; `generation` replaces the config's defaults."""
    model = QoffForCausalLM(config, runtime)
    if isinstance(runtime.decoder, ModuleDecoder):
        model._is_stateful = runtime.decoder.model._is_stateful  # states that cannot go back
    if generation is not None:
        model.generation_config = generation
    return model.eval()
