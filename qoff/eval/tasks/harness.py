"""A qoff model for lm-evaluation-harness, where its name is "qoff". Needs the extra `eval`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError, BudgetError
from qoff.eval.extras import errors_only
from qoff.hf.budget import Room
from qoff.hf.chat import ChatRenderer
from qoff.hf.load import load
from qoff.hf.model import QoffForCausalLM
from qoff.log import say_once

from .continuations import score
from .once import Size

logger = logging.getLogger(__name__)
_LOGITS = 1 << 28  # bytes, of weights that are resident
_ANSWERS = 64  # sequences that are answered together, at most, beyond `batch_size`
_PIECE = 16  # tokens of a question that a pass has room for then, at least


@register_model("qoff")
class QoffLM(HFLM):
    """The harness's model for transformers, with scores computed in ragged batches.

    pretrained: as for `qoff.load`, which takes `options`, or its model and tokenizer. batch_size:
    sequences together. max_length: tokens that a sequence is cut to; None: the model's positions.
    pass_tokens: of a sequence that is scored, in one pass; a packed cache is packed between passes.
    Where a bound of memory has no room for their KV caches, `batch_size` is halved; where it has
    none for their logits, fewer are read together, and fewer tokens only where one sequence does
    not fit; where it has more, several batches go through a layer before the next is read. What is
    no longer than a pass needs no KV cache: see `continuations.score`.
    add_bos_token, prefix_token_id: as for HFLM. max_batch_size is ignored.
    """

    def __init__(
        self,
        pretrained: str | tuple[QoffForCausalLM, PreTrainedTokenizerBase],
        *,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        pass_tokens: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **options: Any,
    ) -> None:
        sequences = _whole("batch_size", batch_size)
        self.pass_tokens = _whole("pass_tokens", pass_tokens)
        if not isinstance(pretrained, tuple):
            pretrained, sequences = _opened(pretrained, sequences, max_length, options)
        model, tokenizer = pretrained
        self._renderer = ChatRenderer()
        with errors_only(HFLM.__module__):  # which warns of models that are not given by name
            super().__init__(
                model,
                backend="causal",
                tokenizer=tokenizer,
                batch_size=sequences,
                max_length=max_length,
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
            )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, without system messages where a template takes none.

        As `ChatRenderer.render`: within its bounds, and by parts where a template reads only these.
        """
        asked = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self.chat_template_args,
        }
        try:
            return self._renderer.render(self.tokenizer, chat_history, **asked)
        except ArgumentError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            say_once(logger, f"system messages are left out of chats: {error}")
            return self._renderer.render(self.tokenizer, others, **asked)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        at_once, budget = override_bs or self.batch_size, self.model.budget

        def room(tokens: int, predicted: int) -> Room:
            if budget is None:
                return Room(at_once, self.pass_tokens)
            return budget.scored_at_once(at_once, tokens, self.pass_tokens, predicted)

        runtime, most = self.model.runtime, at_once * self.pass_tokens

        @cache
        def fits(size: Size) -> bool:
            stay = budget is None or getattr(runtime.decoder, "resident", False)
            large = size.tokens > most or 4 * size.rows * runtime.spec.vocab_size > _LOGITS
            if stay and large and size.sequences > 1:  # more at once would not be faster
                return False
            return budget is None or budget.reads_at_once(*size)

        with tqdm(total=len(requests), disable=disable_tqdm, desc="scoring") as bar:
            found = score(
                runtime,
                [(context, continuation) for _, context, continuation in requests],
                max_length=self.max_length,
                room=room,
                fits=fits,
                at_once=self.pass_tokens if runtime.kv else min(most, self.max_length),
                done=bar.update,
            )
        for (texts, _, _), result in zip(requests, found, strict=True):
            if texts is not None:  # None: a window of a longer text
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, cut off at the texts that a task stops at.

        Where weights stream, as many sequences share each reading of them as the bound of memory
        has room for, `batch_size` at least.
        """
        for request in requests:
            if (new := self._new_tokens(request)) >= self.max_length:
                raise ArgumentError(
                    f"answers of {new} tokens leave no room for a question in {self.max_length}; "
                    "use fewer (max_gen_toks)"
                )
        before = self.batch_size
        self.batch_size_per_gpu = self._answered_at_once(requests)
        try:
            answers: list[str] = super().generate_until(requests, disable_tqdm)
        finally:
            self.batch_size_per_gpu = before
        return answers

    def _new_tokens(self, request: Instance) -> int:
        """How many an answer may have."""
        return int(normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"])

    def _tokens(self, request: Instance) -> int:
        """How many a question and its answer may have."""
        new = self._new_tokens(request)
        return min(len(self.tok_encode(request.args[0])), self.max_length - new) + new

    def _answered_at_once(self, requests: Sequence[Instance]) -> int:
        """How many of these share a decode step."""
        budget, count = self.model.budget, self.batch_size
        if budget is None or getattr(self.model.runtime.decoder, "resident", False):
            return count  # more at once would not be faster
        tokens = max(map(self._tokens, requests), default=0)

        def fits(sequences: int) -> bool:
            return budget.scored_at_once(sequences, tokens, _PIECE, 1).sequences == sequences

        while count < min(len(requests), _ANSWERS) and fits(count + 1):
            count += 1
        return count


def _opened(
    path: str, sequences: int, context: int | None, options: dict[str, Any]
) -> tuple[tuple[QoffForCausalLM, PreTrainedTokenizerBase], int]:
    """The model with room for so many sequences, or for as many as a bound has room for."""
    while True:
        try:
            room = {"batch_size": sequences, "context": context}
            return load(path, **{**room, **options}), sequences
        except BudgetError:
            if sequences == 1 or "batch_size" in options:
                raise
            sequences //= 2


def _whole(name: str, value: int | str) -> int:
    """A number from 1; the harness hands some over as text."""
    if not str(value).isdecimal() or int(value) < 1:
        raise ArgumentError(f"{name} is {value!r}; use a whole number from 1")
    return int(value)
