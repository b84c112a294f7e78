"""From texts to tokens and back: what prompts are, and when an answer is done."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedTokenizerBase

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError

from .request import FinishReason, Result, Sequence

Prompt = str | list[int]


class Answers:
    """The tokenizer of a checkpoint, if it has one, and the tokens that end its answers."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._eos = _eos_tokens(checkpoint)

    def tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. Raises ArgumentError for a text without a tokenizer."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ArgumentError("the checkpoint has no tokenizer; give prompts as token ids")
            return list(self._tokenizer(prompt)["input_ids"])
        return [int(token) for token in prompt]

    def result(self, sequence: Sequence) -> Result | None:
        """What a sequence has come to, if it has."""
        answer, params = sequence.answer, sequence.params
        if not answer:
            return None
        reason: FinishReason | None = None
        if sequence.given:
            return self._given(sequence) if len(answer) == len(sequence.given) else None
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        kept = answer
        text = None
        if answer[-1] in ends:
            reason, kept = "stop", answer[:-1]
        elif params.stops:
            # A character takes four tokens at most.
            recent = self._text(answer[-(4 * max(map(len, params.stops)) + 8) :])
            if any(stop in recent for stop in params.stops):
                text = self._text(answer)
                cuts = [at for stop in params.stops if (at := text.find(stop)) >= 0]
                if cuts:
                    reason, text = "stop", text[: min(cuts)]
        if reason is None and len(answer) >= params.max_tokens:
            reason = "length"
        if reason is None:
            return None
        return Result(
            sequence.index,
            sequence.sample,
            self._text(kept) if text is None else text,
            tuple(kept),
            reason,
            len(sequence.prompt),
        )

    def _given(self, sequence: Sequence) -> Result:
        found = tuple(sequence.log_probabilities)
        return Result(
            sequence.index,
            sequence.sample,
            self._text(sequence.answer),
            sequence.given,
            "given",
            len(sequence.prompt),
            log_probabilities=found,
        )

    def _text(self, tokens: list[int]) -> str:
        """Empty where there is no tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _eos_tokens(checkpoint: Checkpoint) -> set[int]:
    """Tokens that end an answer."""
    found = checkpoint.config.get("eos_token_id")
    if (checkpoint.path / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(checkpoint.path).eos_token_id
    if found is None:
        return set()
    return {found} if isinstance(found, int) else set(found)
