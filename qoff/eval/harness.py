"""A qoff model for lm-evaluation-harness, where its name is "qoff". Needs the extra `eval`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError
from qoff.hf.load import load
from qoff.hf.model import QoffForCausalLM

from .continuations import score

DEFAULT_NEW_TOKENS = 256  # of an answer, where a task does not say


@register_model("qoff")
class QoffLM(TemplateLM):
    """Scores and generates what tasks ask for, with weights resident or streamed.

    pretrained: as for `qoff.load`, which takes `options`, or its model and tokenizer. batch_size:
    sequences together. max_length: tokens that a sequence is cut to; None: the model's positions.
    pass_tokens: of a sequence that is scored, in one pass; a packed cache is packed between passes.
    add_bos_token: whether special tokens are added to texts; None: as the tokenizer does.
    prefix_token_id: what stands before a text without context; None: bos, else eos.
    max_batch_size is taken, as the harness passes it, and of no use.
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
        super().__init__()
        self.batch_size = _whole("batch_size", batch_size)
        self.pass_tokens = _whole("pass_tokens", pass_tokens)
        self.add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self.model, self.tokenizer = (
            pretrained if isinstance(pretrained, tuple) else load(pretrained, **options)
        )
        self.max_length = max_length or resolve_max_length(self.model.config, self.tokenizer)
        self._device = self.model.device

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; by default with special tokens, unless the text begins with one already."""
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
            if has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
        asked = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, verbose=False, **asked))

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probabilities of whole texts, in windows of `max_length` that do not overlap."""
        windows, counts = [], []
        for request in requests:
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            )
            pairs = [make_disjoint_window(window) for window in rolling]
            windows += [(None, *pair) for pair in pairs]
            counts.append(len(pairs))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        with tqdm(total=len(requests), disable=disable_tqdm, desc="scoring") as bar:
            found = score(
                self.model.runtime,
                [(context, continuation) for _, context, continuation in requests],
                max_length=self.max_length,
                batch_size=self.batch_size,
                pass_tokens=self.pass_tokens,
                done=bar.update,
            )
        for (texts, _, _), result in zip(requests, found, strict=True):
            if texts is not None:  # None: a window of a longer text
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, cut off at the texts that a task stops at."""
        groups = Collator(
            [request.args for request in requests],
            sort_fn=lambda args: (-len(self.tok_encode(args[0])), args[0]),
            group_fn=lambda args: args[1],
            group_by="gen_kwargs",
        )
        answers: list[str] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="answering") as bar:
            for batch in groups.get_batched(n=self.batch_size):
                for args, answer in zip(batch, self._answers(batch), strict=True):
                    self.cache_hook.add_partial("generate_until", args, answer)
                    answers.append(answer)
                    bar.update()
        return groups.get_original(answers)

    def _answers(self, batch: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
        """Answers of one batch, whose parameters are the same."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(batch[0][1], DEFAULT_NEW_TOKENS))
        stops = handle_stop_sequences(
            options.pop("until", None), self.tokenizer.decode(self.eot_token_id)
        )
        new = options.pop("max_gen_toks")
        if new >= self.max_length:
            raise ArgumentError(
                f"answers of {new} tokens leave no room for a question in {self.max_length}; "
                "use fewer (max_gen_toks)"
            )
        if not options.get("do_sample"):
            options.pop("temperature", None)
        prompts = [self.tok_encode(text)[new - self.max_length :] for text, _ in batch]
        inputs = self.tokenizer.pad(
            {"input_ids": prompts}, padding_side="left", return_tensors="pt"
        )
        width = inputs["input_ids"].shape[1]
        generating: Any = self.model  # transformers types `generate` for models of its own
        out = generating.generate(
            **inputs,
            max_new_tokens=new,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stops, width, len(batch)),
            pad_token_id=self.tokenizer.pad_token_id,
            **options,
        )
        for row in out[:, width:]:
            text = self.tokenizer.decode(row, skip_special_tokens=True)
            yield postprocess_generated_text(text, stops, None)


def _whole(name: str, value: int | str) -> int:
    """A number from 1; the harness hands some over as text."""
    if not str(value).isdecimal() or int(value) < 1:
        raise ArgumentError(f"{name} is {value!r}; use a whole number from 1")
    return int(value)
