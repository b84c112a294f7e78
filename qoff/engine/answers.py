"""From tokens to texts: when an answer is done, and what it is."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from transformers import PreTrainedTokenizerBase

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, FormatError
from qoff.hf.generation_config import GENERATION_CONFIG, read_generation_config

from .request import Completion, FinishReason, SamplingParams, Sequence

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # as there


def completion(sequence: Sequence, tokenizer: PreTrainedTokenizerBase | None) -> Completion | None:
    """The answer of a sequence, if it is done; its text is empty without a tokenizer.

    One that is pooled has an answer without a token.
    """
    if sequence.pooled is not None:
        if not sequence.decoding:
            return None
        wrong, of = sequence.pooled.error, (sequence.index, 0, sequence.text, sequence.prompt)
        return Completion(*of, "", (), "error" if wrong else "stop", error=wrong)
    kept, params = sequence.answer, sequence.params
    text: str | None = None
    reason: FinishReason = "given" if sequence.given else "length"
    if not kept and not sequence.error:
        return None
    if sequence.error:
        reason = "error"
    elif kept[-1] in sequence.ends and not sequence.given:
        kept, reason = kept[:-1], "stop"
    elif not sequence.given and params.stops and len(kept) > params.min_tokens:
        text = _before_stop(sequence, tokenizer)
        reason = "length" if text is None else "stop"
    if reason in ("given", "length") and len(kept) < sequence.max_tokens:
        return None
    wanted = sequence.given or params.logprobs is not None
    shown = kept
    if params.include_stop_str_in_output and reason == "stop" and text is None:
        shown = sequence.answer  # with the token that ended it
    return Completion(
        sequence.index,
        sequence.sample,
        sequence.text,
        sequence.prompt,
        _text(sequence, tokenizer, shown) if text is None else text,
        tuple(kept),
        reason,
        tuple(sequence.logprobs[: len(kept)]) if wanted else None,
        sequence.error,
        tuple(sequence.prompt_logprobs) if params.prompt_logprobs is not None else None,
    )


def end_tokens(checkpoint: Checkpoint) -> frozenset[int]:
    """Tokens that end an answer."""
    found = checkpoint.config.get("eos_token_id")
    config = read_generation_config(checkpoint.path)
    if config is not None:
        found = found if config.eos_token_id is None else config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset({found} if isinstance(found, int) else found)


def default_params(checkpoint: Checkpoint) -> SamplingParams:
    """What the checkpoint's generation_config.json says, if there is one; else the defaults."""
    config = read_generation_config(checkpoint.path)
    said = {} if config is None else config.to_diff_dict()
    found = {name: said.get(name) for name in _SAMPLING}
    found["max_tokens"] = said.get("max_new_tokens")
    try:
        return SamplingParams(**{name: value for name, value in found.items() if value is not None})
    except ArgumentError as error:
        raise FormatError(f"{checkpoint.path / GENERATION_CONFIG}: {error}") from error


def _before_stop(sequence: Sequence, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """The answer's text before the first stop text, if there is one after `min_tokens` tokens."""
    answer, params = sequence.answer, sequence.params
    # A character takes four tokens at most.
    recent = _text(sequence, tokenizer, answer[-(4 * max(map(len, params.stops)) + 8) :])
    if not any(stop in recent for stop in params.stops):
        return None
    text = _text(sequence, tokenizer, answer)
    least = len(_text(sequence, tokenizer, answer[: params.min_tokens]))
    starts = ((text.find(stop, max(0, least + 1 - len(stop))), stop) for stop in params.stops)
    cuts = [(start, stop) for start, stop in starts if start >= 0]
    if not cuts:
        return None
    start, stop = min(cuts)
    return text[: start + len(stop) * params.include_stop_str_in_output]


def _text(
    sequence: Sequence, tokenizer: PreTrainedTokenizerBase | None, tokens: Tokens[int]
) -> str:
    params = sequence.params
    if tokenizer is None or not params.detokenize:
        return ""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=params.skip_special_tokens))
