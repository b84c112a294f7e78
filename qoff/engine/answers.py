"""From tokens to texts: when an answer is done, and what it is."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from transformers import GenerationConfig, PreTrainedTokenizerBase

from qoff.checkpoint import Checkpoint

from .request import Completion, FinishReason, SamplingParams, Sequence

_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def completion(sequence: Sequence, tokenizer: PreTrainedTokenizerBase | None) -> Completion | None:
    """The answer of a sequence, if it is done; its text is empty without a tokenizer."""
    answer, params = sequence.answer, sequence.params
    if not answer:
        return None
    if sequence.given:
        done = len(answer) == len(sequence.given)
        return _made(sequence, answer, _text(tokenizer, answer), "given") if done else None
    if answer[-1] in sequence.ends:
        kept = answer[:-1]
        return _made(sequence, kept, _text(tokenizer, kept), "stop")
    if params.stops and len(answer) > params.min_tokens:
        text = _before_stop(sequence, tokenizer)
        if text is not None:
            return _made(sequence, answer, text, "stop")
    if len(answer) < sequence.max_tokens:
        return None
    return _made(sequence, answer, _text(tokenizer, answer), "length")


def end_tokens(checkpoint: Checkpoint) -> frozenset[int]:
    """Tokens that end an answer."""
    found = checkpoint.config.get("eos_token_id")
    config = _generation_config(checkpoint)
    if config is not None:
        found = found if config.eos_token_id is None else config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset({found} if isinstance(found, int) else found)


def default_params(checkpoint: Checkpoint) -> SamplingParams:
    """What the checkpoint's generation_config.json says, if there is one; else the defaults."""
    config = _generation_config(checkpoint)
    said = {} if config is None else config.to_diff_dict()
    found = {name: said.get(key) for key, name in _SAMPLING.items()}
    return SamplingParams(**{name: value for name, value in found.items() if value is not None})


def _generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    if not (checkpoint.path / "generation_config.json").exists():
        return None
    return GenerationConfig.from_pretrained(checkpoint.path)


def _made(sequence: Sequence, kept: list[int], text: str, reason: FinishReason) -> Completion:
    """The answer of which these tokens are kept."""
    return Completion(
        sequence.index,
        sequence.sample,
        sequence.text,
        sequence.prompt,
        text,
        tuple(kept),
        reason,
        tuple(sequence.logprobs[: len(kept)])
        if sequence.given or sequence.params.logprobs is not None
        else None,
    )


def _before_stop(sequence: Sequence, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """The answer's text before the first stop text, if there is one after `min_tokens` tokens."""
    answer, params = sequence.answer, sequence.params
    # A character takes four tokens at most.
    recent = _text(tokenizer, answer[-(4 * max(map(len, params.stops)) + 8) :])
    if not any(stop in recent for stop in params.stops):
        return None
    text, least = _text(tokenizer, answer), len(_text(tokenizer, answer[: params.min_tokens]))
    starts = (text.find(stop, max(0, least + 1 - len(stop))) for stop in params.stops)
    cuts = [start for start in starts if start >= 0]
    return text[: min(cuts)] if cuts else None


def _text(tokenizer: PreTrainedTokenizerBase | None, tokens: Tokens[int]) -> str:
    if tokenizer is None:
        return ""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
