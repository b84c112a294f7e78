"""The bodies of requests, as OpenAI has them, with vLLM's names for what OpenAI does not have."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from qoff.engine import PoolingParams, SamplingParams, StructuredOutputs
from qoff.engine.prompts import Chat
from qoff.errors import ArgumentError, raised_as

from .body import Body, First
from .messages import Messages, NamedTool, Tool, Tools
from .tools import Calls

_MOST_LOGPROBS = 20
_SEEDS = 2**63  # as the sampler has them
_LEAST_HEAT = 0.01  # a temperature below it is 0
Count = Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Prompts = Field(fail_fast=True, max_length=4096)
Input = (
    str
    | Annotated[list[str], Prompts]
    | Annotated[list[int], First]
    | Annotated[list[Annotated[list[int], First]], Prompts]
)
Stop = Annotated[str, Field(max_length=1000)]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema", default_factory=dict)]
    strict: bool | None = None  # always


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and is needed there")
        return self


class Structured(Body):
    """vLLM's; see `qoff.engine.StructuredOutputs`."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], First] | None = None
    grammar: str | None = None
    json_object: bool = False


class Generation(Body):
    """Fields of chat and text completions. A null stands for the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: Annotated[int, Field(ge=-_SEEDS)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    # These change no answer of OpenAI's, either; clients send them unasked.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    logit_bias: Annotated[dict[str, Number] | None, Field(max_length=300)] = None
    # vLLM's
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=1000)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Count | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None

    @model_validator(mode="after")
    def _streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs does not go with stream")
        return self

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """How the answer is drawn. Raises ArgumentError for values out of range."""
        given = {name: getattr(self, name) for name in _PARAMS} | more
        with raised_as(ArgumentError, "logit_bias has token ids, as texts"):
            given["logit_bias"] = {int(k): v for k, v in (self.logit_bias or {}).items()} or None
        given.setdefault("structured_outputs", self.structured())
        if given["seed"] is not None:
            given["seed"] %= _SEEDS
        if given["top_p"] == 0 or 0 < (given["temperature"] or 0) < _LEAST_HEAT:
            given |= {"temperature": 0.0, "top_p": None}  # the likeliest token, as for OpenAI
        return replace(defaults, **{k: v for k, v in given.items() if v is not None})

    def structured(self) -> StructuredOutputs | None:
        """What the answer must match. Raises ArgumentError for two such demands."""
        form, wanted = self.response_format, self.structured_outputs
        if form is None or form.type == "text":
            return None if wanted is None else StructuredOutputs(**wanted.model_dump(by_alias=True))
        if wanted is not None:
            raise ArgumentError("give response_format or structured_outputs, not both")
        if form.json_schema is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=json.dumps(form.json_schema.schema_))


_PARAMS = (
    "n", "seed", "stop", "max_tokens", "temperature", "top_p", "presence_penalty",
    "frequency_penalty", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids",
    "ignore_eos", "prompt_logprobs", "include_stop_str_in_output",
)  # fmt: skip


_SERVER_SETS = frozenset(
    {"chat_template", "messages", "tools", "documents", "add_generation_prompt",
     "continue_final_message", "tokenizer", "self"}
)  # fmt: skip


class ChatRequest(Generation):
    messages: Annotated[Messages, Field(min_length=1)]
    tools: Annotated[list[Tool], Tools] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's, as the next two
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    def chat(self) -> Chat:
        """The conversation. Raises ArgumentError for options that are not the client's to set."""
        more = self.chat_template_kwargs or {}
        if wrong := sorted(_SERVER_SETS & more.keys()):
            raise ArgumentError(f"chat_template_kwargs may not have {', '.join(wrong)}")
        options: dict[str, Any] = {
            **more,
            "continue_final_message": self.continue_final_message,
            "add_generation_prompt": self.add_generation_prompt,
        }
        if self.tools and self.tool_choice != "none":
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return Chat([message.plain() for message in self.messages], options)

    def calls(self) -> Calls | None:
        """Which tools the answer may or must call. Raises ArgumentError for a contradiction."""
        choice = self.tool_choice
        if not self.tools:
            if choice not in (None, "none", "auto"):
                raise ArgumentError("tool_choice needs tools")
            return None
        if choice == "none":
            return None
        tools = {one.function.name: one.function.parameters or {} for one in self.tools}
        name = choice.function.name if isinstance(choice, NamedTool) else None
        if name is not None and name not in tools:
            raise ArgumentError(f"tool_choice names {name[:64]!r}, which is not among the tools")
        if name is not None:
            tools = {name: tools[name]}
        named = name is not None
        if self.structured() is not None:
            raise ArgumentError("tools and structured outputs do not go together")
        must = named or choice == "required"
        return Calls(tools, must, named, one_only=self.parallel_tool_calls is False)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """How the answer is drawn; without a bound it may fill the context."""
        if self.top_logprobs and not self.logprobs:
            raise ArgumentError("top_logprobs needs logprobs")
        shown = (self.top_logprobs or 0) if self.logprobs else None
        most = self.max_completion_tokens
        more: dict[str, Any] = {
            "logprobs": shown,
            "max_tokens": self.max_tokens if most is None else most,
        }
        calls, defaults = self.calls(), replace(defaults, max_tokens=None)
        if calls is None or not calls.must:
            return self.params(defaults, **more)
        more["structured_outputs"] = StructuredOutputs(json=calls.schema())
        # What ends a text may be in the JSON of a call, which is not to end before it is complete.
        return replace(self.params(defaults, **more), stop=None, stop_token_ids=None)


class CompletionRequest(Generation):
    prompt: Input
    logprobs: Count | None = None
    echo: bool | None = None  # the prompt before its answer
    suffix: Literal[""] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _answers(self) -> CompletionRequest:
        if self.echo and self.stream:
            raise ValueError("echo does not go with stream")
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of has to be n: all answers are given")
        return self

    @property
    def prompt_alone(self) -> bool:
        """Whether no token of an answer is wanted, but the prompt."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """How the answers are drawn; OpenAI's 16 tokens without a bound."""
        most = 1 if self.prompt_alone else self.max_tokens
        more: dict[str, Any] = {"logprobs": self.logprobs, "max_tokens": most}
        if self.echo and self.prompt_logprobs is None:
            more["prompt_logprobs"] = self.logprobs
        return self.params(replace(defaults, max_tokens=16), **more)


class EmbeddingRequest(Body):
    """Texts or token ids, of each of which a vector is wanted."""

    model: str | None = None
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    normalize: bool | None = None  # vLLM's
    pooling: Literal["mean", "last", "first"] | None = None

    def params(self) -> PoolingParams:
        """How they are pooled. Raises ArgumentError for values out of range."""
        return PoolingParams(self.pooling, self.dimensions, self.normalize)


class BatchLine(Body):
    """A line of a batch file."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class BatchRequest(Body):
    """A file of such lines, to be answered as there is room."""

    input_file_id: Annotated[str, Field(max_length=100)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, Stop] | None, Field(max_length=16)] = None


class TokenizeRequest(Body):
    """A text, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], First]
