"""From the body of a request to what the engine is asked, and from its answers to a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine.prompts import Chat
from qoff.models.forward_pass import NOT_FINITE

from .answers import Form, usage
from .errors import ApiError
from .protocol import ChatRequest, CompletionRequest
from .thinking import parted, style_of
from .thinking_marks import Style
from .tools import Calls, ended, split, written

_END = 16  # tokens at the end of a prompt that may be a mark of thinking


@dataclass(frozen=True)
class Asked:
    """A request that was understood."""

    form: Form
    prompts: str | list[Any] | Chat
    params: SamplingParams
    calls: Calls | None
    stream: bool
    include_usage: bool
    adapter: str | None
    echo: bool = False
    prompt_logprobs: bool = False  # asked for as such, not for `echo` alone
    prompt_alone: bool = False  # not the answer, of which the engine computes a token
    thinks: Style | None = None  # how the answer marks what it thinks, where that is told apart
    continued: str = ""  # the message that the answer goes on with

    def split(self, one: Completion) -> tuple[str, str, list[dict[str, Any]]]:
        """What an answer thinks, what it says, and the calls in it."""
        form, tokens, thinks = self.form, one.token_ids, self.thinks
        if thinks is None:
            return "", *split(self.calls, one.text, lambda: form.marked(tokens))
        begun = self.begins_thinking(one.prompt_token_ids)
        marked, said = form.with_marks(tokens, thinks.marks), form.marked(tokens)
        thinking, text, said = parted(thinks, begun, one.text, marked, said)
        return thinking, *split(self.calls, text, lambda: said)

    def begins_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether an answer to a prompt goes on in thinking."""
        if self.thinks is None:
            return False
        said = self.continued.lstrip()
        if said.startswith(self.thinks.begin) and self.thinks.end not in said:
            return True
        return self.thinks.begun(self.form.marked(prompt[-_END:]))

    def document(self, answers: Sequence[Completion], prompt_tokens: int) -> dict[str, Any]:
        """The whole answer: `answers` of its prompts in order, n of each.

        An answer that is an error ends with that reason, and says what is wrong. Raises ApiError
        where all are.
        """
        choices, generated = [], 0
        errors = [answer_error(one) for one in answers]
        if None not in errors:
            raise next(filter(None, errors))
        for number, (one, error) in enumerate(zip(answers, errors, strict=True)):
            if self.prompt_alone and error is None:
                one = replace(one, text="", token_ids=(), logprobs=(), finish_reason="length")
            generated += len(one.token_ids)
            thinking, text, tools = self.split(one)
            logprobs = self.form.logprobs(one.token_ids, one.logprobs or ())
            if self.echo:
                prompt, steps = one.prompt_token_ids, one.prompt_logprobs
                before = self.form.text_of(prompt, one.prompt)
                logprobs = self.form.echoed(prompt, steps, logprobs, before)
                text = before + text
            reason = ended(self.calls, tools, one.finish_reason)
            choices.append(self.form.choice(number, text, reason, logprobs, tools, thinking))
            if self.prompt_logprobs and one.prompt_logprobs is not None:
                choices[-1]["prompt_logprobs"] = self.form.prompt_logprobs(one.prompt_logprobs)
            if error is not None:
                choices[-1] |= error.body()
        return self.form.whole(choices, usage(prompt_tokens, generated))


def asked(
    body: ChatRequest | CompletionRequest, model: str, llm: LLM, thinking: bool = True
) -> Asked:
    """What a body asks of an LLM. model: its name; a body may have that of an adapter instead.

    thinking: whether it is told apart from what answers say.

    Raises ApiError and ArgumentError for what it cannot do.
    """
    params = body.sampling(llm.get_default_sampling_params())
    chat = isinstance(body, ChatRequest)
    prompts = body.chat() if isinstance(body, ChatRequest) else body.prompt
    calls = body.calls() if isinstance(body, ChatRequest) else None
    if llm.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer")
    if chat and not llm.tokenizer.chat_template:
        raise ApiError(400, "the model has no chat template; use /v1/completions")
    if calls is not None:
        template = llm.tokenizer.get_chat_template(tools=[{}])
        calls = written(calls, template)
    thinks, continued = None, ""
    if isinstance(body, ChatRequest) and thinking and params.structured_outputs is None:
        thinks = style_of(llm.tokenizer.chat_template)
        if body.continue_final_message:
            continued = str(body.messages[-1].plain().get("content", ""))
    adapter = body.model if body.model in llm.adapters else None
    form = Form("chat" if chat else "text", adapter or model, llm.tokenizer, params.logprobs)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    echo = isinstance(body, CompletionRequest) and bool(body.echo)
    return Asked(
        form, prompts, params, calls, bool(body.stream), with_usage, adapter, echo,
        prompt_logprobs=body.prompt_logprobs is not None,
        prompt_alone=isinstance(body, CompletionRequest) and body.prompt_alone, thinks=thinks,
        continued=continued,
    )  # fmt: skip


def check_model(
    name: str | None, model: str, adapters: Sequence[str] = (), where: str = "this server"
) -> None:
    """Raise ApiError for a name that is neither the model's nor an adapter's. where: they are."""
    if name is not None and name != model and name not in adapters:
        raise ApiError(
            404,
            f"there is no model {name[:100]!r}; {where} has "
            f"{', '.join(map(repr, (model, *adapters)))}",
            param="model",
            code="model_not_found",
        )


def answer_error(answer: Completion) -> ApiError | None:
    """What is wrong with an answer that is an error."""
    if answer.finish_reason != "error":
        return None
    return ApiError(500 if answer.error == NOT_FINITE else 400, answer.error)


def check_answer(answer: Completion) -> None:
    """Raise what is wrong with one."""
    if (error := answer_error(answer)) is not None:
        raise error
