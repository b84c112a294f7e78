"""A stage of Ray Data's pipelines that answers prompts, shaped like `ray.data.llm`'s."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset
from ray.data.checkpoint import CheckpointConfig

from qoff.engine import Completion, SamplingParams
from qoff.engine.prompts import Chat, prompt_list
from qoff.errors import ArgumentError, QoffError
from qoff.jobs.lines import Line
from qoff.jobs.requests import Bad

from .ledger import new_ledger
from .worker import Opening, Worker

_CALLS = 2  # blocks that a worker answers at a time
_BOUNDED = {"plan", "device_memory", "max_memory"}  # by one of these a worker's GPU memory is
ERROR = "__inference_error__"
_ANSWER = pa.schema(
    [
        ("generated_text", pa.string()),
        ("generated_tokens", pa.list_(pa.int64())),
        ("num_generated_tokens", pa.int64()),
        ("num_input_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        (ERROR, pa.string()),
    ]
)  # of the names of ray.data.llm


@dataclass(frozen=True)
class ProcessorConfig:
    """What answers: the names are those of `ray.data.llm.vLLMEngineProcessorConfig`.

    model_source: as for `qoff.LLM`; every machine must find it under this name. engine_kwargs:
    options of `qoff.LLM`, with a plan, say; without a plan and bounds the planner decides, for each
    worker's part of its machine. batch_size: rows of a block, answered by one worker. concurrency:
    workers; None: one for each GPU, or for each machine without one. num_cpus, num_gpus: of a
    worker; None: a GPU, or all processors of the smallest machine but what other stages take: one,
    two with a checkpoint. Parts of a GPU need `device_memory` in engine_kwargs.
    should_continue_on_error: a row that cannot be answered has the reason as `__inference_error__`;
    otherwise it ends the run. id_column, checkpoint_path: rows that a run with the same path wrote
    (`write_parquet` and the like) are not answered again, where Ray read them from files or a
    table. Ray Data keeps this, in a folder that all machines have; see
    `ray.data.checkpoint.CheckpointConfig`.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 64
    concurrency: int | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    should_continue_on_error: bool = True
    id_column: str | None = None
    checkpoint_path: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("concurrency", self.concurrency)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError(f"{name} is {value!r}; use a whole number from 1")
        if (self.id_column is None) != (self.checkpoint_path is None):
            raise ArgumentError("a checkpoint needs both: id_column and checkpoint_path")


class Processor:
    """What `build_processor` makes: takes a dataset, returns one with answers."""

    def __init__(
        self,
        config: ProcessorConfig,
        preprocess: Callable[[dict[str, Any]], dict[str, Any]] | None,
        postprocess: Callable[[dict[str, Any]], dict[str, Any]] | None,
        preprocess_map_kwargs: Mapping[str, Any],
        postprocess_map_kwargs: Mapping[str, Any],
    ) -> None:
        self.config = config
        self._before = preprocess, {"num_cpus": 0, **preprocess_map_kwargs}
        self._after = postprocess, {"num_cpus": 0, **postprocess_map_kwargs}

    def __call__(self, dataset: Dataset) -> Dataset:
        """The dataset with answers, computed when it is asked for them."""
        config = self.config
        if config.id_column is not None:
            dataset.context.checkpoint_config = CheckpointConfig(
                config.id_column, config.checkpoint_path, delete_checkpoint_on_success=False
            )
        dataset = _mapped(dataset, *self._before)
        dataset = answered(
            dataset,
            RowWorker,
            config,
            Opening(config.model_source, dict(config.engine_kwargs)),
            batch_size=config.batch_size,
            more={"go_on": config.should_continue_on_error},
            spare=1.0 if config.id_column is None else 2.0,  # one reads, one filters what is done
        )
        return _mapped(dataset, *self._after)


def _mapped(dataset: Dataset, work: Any, options: Mapping[str, Any]) -> Dataset:
    return dataset if work is None else dataset.map(work, **options)


def build_processor(
    config: ProcessorConfig,
    preprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    postprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """A stage that answers the rows of a dataset: `ds = build_processor(config)(ds)`.

    preprocess makes rows with `messages` (put into the chat template) or `prompt` (a text or token
    ids, as it is), and `sampling_params` if wanted, a dict of `SamplingParams`' fields. All columns
    of a row go through; beside them postprocess finds `generated_text`, `generated_tokens`,
    `num_generated_tokens`, `num_input_tokens`, `finish_reason` and `__inference_error__`, None
    where all is well. Both run on no processor of their own unless the kwargs, of `Dataset.map`,
    say so. A worker or a machine that dies costs the blocks it had; a row that ends its worker
    four times is an error like any other.
    """
    return Processor(
        config, preprocess, postprocess, preprocess_map_kwargs or {}, postprocess_map_kwargs or {}
    )


def answered(
    dataset: Dataset,
    worker: type[Worker],
    config: ProcessorConfig,
    opening: Opening,
    *,
    batch_size: int,
    more: Mapping[str, Any],
    spare: float,
) -> Dataset:
    """A dataset whose batches went through workers.

    more: what these are told beside the model. spare: processors of a machine for other stages.
    """
    if not ray.is_initialized():
        ray.init()
    wanted = shares(config, str(opening.options.get("device", "auto")), spare)
    opening, workers = replace(opening, part=wanted.part), wanted.workers
    return dataset.map_batches(
        worker,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(
            size=workers, max_concurrent_calls_per_actor=_CALLS, enable_true_multi_threading=True
        ),
        fn_constructor_kwargs={"opening": opening, "ledger": new_ledger(workers), **more},
        **wanted.resources,
    )


@dataclass(frozen=True)
class Shares:
    """How many workers there are, what Ray gives each, and which part of its machine that is."""

    workers: int
    resources: dict[str, Any]  # options of Ray's
    part: float


def shares(config: ProcessorConfig, device: str, spare: float) -> Shares:
    """The workers of a cluster. spare: processors of a machine that other stages need.

    Raises ArgumentError where no machine has what a worker wants, or workers leave too few
    processors.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    processors = sum(node.get("CPU", 0) for node in nodes)
    if processors < spare:
        raise ArgumentError(f"the stages beside the workers need {spare:g} processors of Ray")
    gpus = [int(node["GPU"]) for node in nodes if node.get("GPU", 0) >= (config.num_gpus or 1)]
    if config.num_gpus or (config.num_gpus is None and gpus and device != "cpu"):
        if not gpus:
            raise ArgumentError(f"no machine of the cluster has {config.num_gpus:g} GPUs")
        each = config.num_gpus or 1.0
        if each < 1 and all(config.engine_kwargs.get(one) is None for one in _BOUNDED):
            raise ArgumentError(
                f"{each:g} GPUs a worker: others use the same GPU, so engine_kwargs needs "
                "device_memory, for one worker"
            )
        workers = config.concurrency or sum(
            gpu * int(1 / each) if each < 1 else int(gpu / each) for gpu in gpus
        )
        resources = {"num_gpus": each, "num_cpus": config.num_cpus or 1.0}
        _check_rest(processors, workers, resources["num_cpus"], spare)
        return Shares(workers, resources, min(1.0, each / max(gpus)))
    cpus = [node["CPU"] for node in nodes if node.get("CPU", 0) >= (config.num_cpus or 1)]
    if not cpus:
        raise ArgumentError("no machine of the cluster has as many processors as a worker wants")
    if config.num_cpus:
        most = sum(int(count / config.num_cpus) for count in cpus)
        most = min(most, int((processors - spare) / config.num_cpus))
        workers = config.concurrency or max(1, most)
        _check_rest(processors, workers, config.num_cpus, spare)
        part = min(1.0, config.num_cpus / max(cpus))
        return Shares(workers, {"num_cpus": config.num_cpus}, part)
    together = ceil((config.concurrency or 1) / len(cpus))  # on one machine
    mine = max(0.0, (min(cpus) - spare) / together)
    each = float(int(mine)) if mine > 1 else mine
    return Shares(config.concurrency or len(cpus), {"num_cpus": each}, 1 / together)


def _check_rest(processors: float, workers: int, each: float, spare: float) -> None:
    """Without processors of their own the stages that read would wait for ever."""
    rest = processors - workers * each
    if rest < spare:
        raise ArgumentError(
            f"the stages beside the workers need {spare:g} processors of Ray; {workers} workers "
            f"with {each:g} each leave {max(0.0, rest):g} of {processors:g}: lower num_cpus or "
            "concurrency"
        )


class RowWorker(Worker):
    """Adds answers to tables of rows. go_on: with rows that cannot be answered."""

    def __init__(self, opening: Opening, ledger: Any, go_on: bool) -> None:
        super().__init__(opening, ledger)
        self._go_on = go_on

    def __call__(self, table: pa.Table) -> pa.Table:
        lines = [Line(number, number, None) for number in range(len(table))]
        reader = RowReader(table.to_pylist(), self.llm.get_default_sampling_params())
        answers = self.answer(lambda: reader, lines)
        found = {one.pop("row"): one for one in map(json.loads, answers.output + answers.errors)}
        rows = [found[number] for number in range(len(table))]
        if not self._go_on:
            for row in rows:
                if row.get(ERROR):
                    raise QoffError(row[ERROR])
        for one in _ANSWER:
            if one.name in table.column_names:
                table = table.drop_columns(one.name)
            table = table.append_column(
                one, pa.array([row.get(one.name) for row in rows], one.type)
            )
        return table


@dataclass(frozen=True)
class RowReader:
    """Requests of a table's rows; a line has a row's number alone."""

    rows: Sequence[Mapping[str, Any]]
    defaults: SamplingParams

    def skip(self, line: Line) -> None:
        pass

    def read(self, line: Line) -> RowRequest | Bad:
        row = self.rows[line.number]
        try:
            given = {k: v for k, v in (row.get("sampling_params") or {}).items() if v is not None}
            params = replace(self.defaults, **given)
            if params.n != 1:
                raise ArgumentError("a row has one answer; leave out n")
            messages, prompt = row.get("messages"), row.get("prompt")
            if (messages is None) == (prompt is None):
                raise ArgumentError("a row needs messages or a prompt, and not both")
            wanted: Any = prompt if messages is None else Chat([_plain(one) for one in messages])
            if len(prompt_list(wanted)) != 1:
                raise ArgumentError("a row has one prompt: a text or token ids")
            return RowRequest(line, wanted, params)
        except (ArgumentError, TypeError, AttributeError, ValueError) as error:
            return Bad(line, _error(line, error))


@dataclass(frozen=True)
class RowRequest:
    """A row with a prompt."""

    line: Line
    prompts: Any
    params: SamplingParams
    adapter: str | None = None

    def answered(self, answers: Sequence[Completion], prompt_tokens: int) -> list[bytes]:
        (one,) = answers
        if one.finish_reason == "error":
            raise ArgumentError(one.error)
        said = {
            "row": self.line.number,
            "generated_text": one.text,
            "generated_tokens": one.token_ids,
            "num_generated_tokens": len(one.token_ids),
            "num_input_tokens": prompt_tokens,
            "finish_reason": one.finish_reason,
        }
        return [json.dumps(said).encode()]

    def failed(self, error: Exception) -> bytes:
        return _error(self.line, error)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the fields that only others have: a column has the fields of all."""
    return {name: value for name, value in message.items() if value is not None}


def _error(line: Line, error: Exception) -> bytes:
    said = {"row": line.number, "finish_reason": "error", ERROR: str(error) or repr(error)}
    return json.dumps(said).encode()
