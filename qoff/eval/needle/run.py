"""Whether a key hidden in a long text is found again: by length, depth and form of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, Completion, SamplingParams
from qoff.errors import ArgumentError
from qoff.hf.cache import QoffCache
from qoff.hf.checkpoints import find_checkpoint
from qoff.hf.device import device_for
from qoff.hf.load import AUTO, load
from qoff.hf.tokenizer import load_tokenizer
from qoff.plan import Plan

from .prompts import NeedlePrompt, NeedleSettings, prompts
from .result import CacheSetting, NeedleResult, Trial, is_retrieved

if TYPE_CHECKING:
    from qoff.hf.model import QoffForCausalLM

Progress = Callable[[int, int], None]  # prompts done, and of how many


@dataclass(frozen=True)
class NeedleResources:
    """What a needle test may use. options: of `open_runtime`, such as device and device_memory.

    prefill_tokens: of a prompt, read in one pass; later ones attend to packed tokens. With a
    float32 cache a prompt is read in one pass, whatever its length, if memory is not bounded.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    prefill_tokens: int = 1024


def run(
    model_path: str | PathLike[str],
    settings: NeedleSettings,
    caches: Mapping[str, CacheSetting],
    *,
    resources: NeedleResources | None = None,
    progress: Progress | None = None,
) -> NeedleResult:
    """Ask for all keys with each of the caches, which are named by what the result calls them.

    model_path: as for `qoff.load`. Packed caches run in `qoff.LLM`, within a plan for the longest
    prompt. Each prompt is read once, then answered, and beside that the right key is decoded for
    its log-probability. Raises ArgumentError for lengths that the model has no positions for, and
    for those without room for a question, and the errors of `qoff.LLM` and `qoff.load`.
    """
    resources = resources or NeedleResources()
    device = device_for(resources.options.get("device", AUTO))
    path = find_checkpoint(model_path, device=device)
    _check_positions(path, max(settings.lengths))
    if not caches:
        raise ArgumentError("there is no cache setting; name one at least")
    asked = list(prompts(load_tokenizer(path), settings))
    trials: list[Trial] = []
    for name, cache in caches.items():
        for prompt, answer, score in _answers(path, asked, settings, cache, resources):
            where = prompt.length, prompt.depth, prompt.repetition, len(prompt.tokens)
            right = is_retrieved(answer, prompt.key)
            trials.append(Trial(name, *where, prompt.key, answer, right, score))
            if progress is not None:
                progress(len(trials), len(asked) * len(caches))
    names = list(caches)  # trials come as they are done
    trials.sort(key=lambda t: (names.index(t.cache), t.length, t.repetition, t.depth))
    return NeedleResult(str(model_path), settings, dict(caches), tuple(trials))


def _answers(
    path: Path,
    asked: Sequence[NeedlePrompt],
    settings: NeedleSettings,
    cache: CacheSetting,
    resources: NeedleResources,
) -> Iterator[tuple[NeedlePrompt, str, float]]:
    """Prompts, their answers and the log-probabilities of their keys, as they are done.

    Packed caches through `qoff.LLM`, others through `qoff.load`, one prompt at a time.
    """
    context, options = max(settings.lengths), dict(resources.options)
    if cache.kv is None:
        model, tokenizer = load(path, context=context, kv=None, **options)
        with model, torch.inference_mode():
            for prompt in asked:
                found, score = _ask(model, prompt, settings.answer_tokens)
                yield prompt, str(tokenizer.decode(found, skip_special_tokens=True)), score
        return
    planned = {name: options.pop(name) for name in ("slots", "activation_bits") if name in options}
    plan = Plan(
        batch_size=2,  # an answer and the key of each prompt
        context=context,
        prefill_tokens=resources.prefill_tokens,
        kv=cache.kv,
        kv_placement=cache.placement,
        **planned,
    )
    params = SamplingParams(temperature=0, max_tokens=settings.answer_tokens)
    halves: dict[int, Completion] = {}
    with LLM(path, plan, **options) as llm:
        texts, keys = [p.tokens for p in asked], [p.key_tokens for p in asked]
        for result in llm.stream(texts, params, keys):
            if result.finish_reason == "error":
                raise ArgumentError(result.error)
            other = halves.setdefault(result.index, result)
            if other is not result:
                given = result.finish_reason == "given"
                answer, key = (other, result) if given else (result, other)
                assert key.cumulative_logprob is not None
                yield asked[result.index], answer.text, key.cumulative_logprob


def _ask(model: QoffForCausalLM, prompt: NeedlePrompt, most: int) -> tuple[list[int], float]:
    """The greedy answer of at most so many tokens, and the key's log-probability."""
    cache, ids = QoffCache(model), torch.tensor([prompt.tokens])
    read = ids.shape[1]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=most,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=model.generation_config.pad_token_id or 0,
    )
    key = torch.tensor(prompt.key_tokens)
    try:  # back to before the prompt's last token, which predicts the key's first
        cache.crop(read - 1 - cache.get_seq_length())
        inputs = torch.cat([ids[0, -1:], key[:-1]])
    except ArgumentError:  # states cannot go back
        cache, inputs = QoffCache(model), torch.cat([ids[0], key[:-1]])
    logits = model(inputs[None], cache=cache, logits_to_keep=len(key)).logits[0]
    chosen = logits.log_softmax(-1).gather(1, key[:, None])
    return out[0, read:].tolist(), float(chosen.sum())


def _check_positions(path: Path, tokens: int) -> None:
    """Refuse lengths beyond the positions that a model was trained for."""
    limit = Checkpoint.open(path).config.get("max_position_embeddings")
    if limit is not None and tokens > limit:
        raise ArgumentError(
            f"{path}: a length of {tokens} tokens, but the model has {limit} positions; "
            "use shorter lengths"
        )
