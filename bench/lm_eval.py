"""lm-evaluation-harness on weights that stream: qoff's model for it, and its own over `qoff.load`.

Two tasks are made of a text in the package: which of four endings a passage has (log-likelihoods),
and how it goes on (`generate_until`). Both ways take `--memory` of the weights' bytes as device
memory, and float KV caches. "hf" is the harness's `hf` model around a model of `qoff.load`, which
reads batch after batch: with batches of 1, the harness's default, which the bars compare with, and
with the largest of 8, 4, 2 and 1 that the bound has room for in each task. "qoff" is `QoffLM`, of
`qoff eval --tasks`, where batches share a reading of the weights. Samples per second are documents
over the seconds in the model; tasks are made and scored outside. Scores have to be equal: metrics,
answers and whether an ending was the likeliest identical, and log-probabilities within 3e-5 of
themselves or 1e-4 nats; else the status is 1.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, BudgetError, QoffError
from qoff.eval.extras import errors_only, extra
from qoff.eval.tasks.run import manager_of
from qoff.eval.texts import read_text
from qoff.hf.load import load

from .demo import fetch_checkpoint
from .harness import Bar, Report, arguments

TASKS = ("bench_endings", "bench_answers")
_WANTED = 3.0  # times the samples per second of the harness's own model, by default
_PASSAGE, _ENDING, _NEW = 8, 3, 8  # words, words, tokens
_BATCHES = (8, 4, 2, 1)
_CONTEXTS = range(512, 0, -32)  # tokens to keep room for, largest first
_LENGTH = 64  # tokens of a passage and what follows, at most
_RELATIVE, _ABSOLUTE = 3e-5, 1e-4  # nats of a log-probability

_COMMON = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{passage}}}}"
"""
_ENDINGS = """output_type: multiple_choice
doc_to_choice: "{{endings}}"
doc_to_target: right
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
_ANSWERS = f"""output_type: generate_until
doc_to_target: "{{{{ending}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: {_NEW}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@dataclass(frozen=True)
class Run:
    """What one way made of a task. samples: of each document, what the model said."""

    metrics: dict[str, float]
    samples: list[list[Any]]  # texts, or pairs of a log-probability and whether it was greedy
    seconds: float  # in the model
    swept: float  # bytes read, over those of the weights

    @property
    def rate(self) -> float:
        """Samples per second."""
        return len(self.samples) / self.seconds


def make_tasks(folder: Path, count: int, text: str, seed: int = 0) -> None:
    """Write both tasks, of `count` documents each, into a folder.

    Raises ArgumentError for a text with too few words for so many documents.
    """
    words, draw = text.split(), random.Random(seed)
    length = _PASSAGE + _ENDING
    if len(words) < 4 * length or count < 1:
        raise ArgumentError(
            f"{count} documents of a text of {len(words)} words; use 1 at least, and "
            f"{4 * length} words"
        )
    documents = []
    for _ in range(count):
        start = draw.randrange(len(words) - length)
        others = [draw.randrange(len(words) - _ENDING) for _ in range(3)]
        endings = [" ".join(words[at : at + _ENDING]) for at in (start + _PASSAGE, *others)]
        ending = endings[0]
        draw.shuffle(endings)
        passage = " ".join(words[start : start + _PASSAGE])
        right = endings.index(ending)
        documents.append({"passage": passage, "endings": endings, "right": right, "ending": ending})
    data = folder / "passages.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)) + "\n")
    for name, rest in zip(TASKS, (_ENDINGS, _ANSWERS), strict=True):
        head = _COMMON.format(name=name, data=json.dumps(str(data)))
        (folder / f"{name}.yaml").write_text(head + rest)


def run_task(lm: Any, task: str, manager: Any, weights: int) -> Run:
    """Run a task on a model of the harness that has one of qoff's. weights: bytes."""
    seconds, read = 0.0, lm.model.stats().disk_bytes

    def timed(answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            try:
                return answer(*args, **more)
            finally:
                seconds += time.perf_counter() - start

        return call

    lm.loglikelihood, lm.generate_until = timed(lm.loglikelihood), timed(lm.generate_until)
    try:
        with errors_only("lm_eval.api.task"):
            found = extra("lm_eval").simple_evaluate(
                lm, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True
            )
    finally:
        del lm.loglikelihood, lm.generate_until
    metrics = {
        name: float(value)
        for name, value in found["results"][task].items()
        if isinstance(value, int | float) and "stderr" not in name
    }
    said = sorted(found["samples"][task], key=lambda one: int(one["doc_id"]))
    samples = [[each[0] for each in one["resps"]] for one in said]
    return Run(metrics, samples, seconds, (lm.model.stats().disk_bytes - read) / weights)


def differences(one: Run, other: Run) -> list[str]:
    """In what two ways' scores of a task are not equal."""
    found = []
    if one.metrics != other.metrics:
        found.append(f"metrics {one.metrics} and {other.metrics}")
    for number, both in enumerate(zip(one.samples, other.samples, strict=True)):
        for a, b in zip(*both, strict=True):
            if isinstance(a, str):
                equal = a == b
            else:
                near = math.isclose(a[0], b[0], rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
                equal = near and a[1] == b[1]
            if not equal:
                found.append(f"document {number}: {a!r} and {b!r}")
    return found


def farthest(one: Run, other: Run) -> float:
    """The largest difference of two log-probabilities, in nats; 0 where there are none."""
    pairs = [
        (a, b)
        for both in zip(one.samples, other.samples, strict=True)
        for a, b in zip(*both, strict=True)
        if not isinstance(a, str)
    ]
    return max((abs(a[0] - b[0]) for a, b in pairs), default=0.0)


@contextmanager
def hf_model(checkpoint: Path, memory: int, batch: int) -> Iterator[Any]:
    """The harness's `hf` model over one of `qoff.load`, with as much room beside the weights as
    the bound has. Raises BudgetError."""
    options: dict[str, Any] = {"device": "cpu", "device_memory": memory, "kv": None}
    for context in _CONTEXTS:
        try:
            model, tokenizer = load(checkpoint, batch_size=batch, context=context, **options)
        except BudgetError:
            if context == _CONTEXTS[-1]:
                raise
        else:
            break
    kind = extra("lm_eval.models.huggingface").HFLM
    with closing(model), errors_only(kind.__module__):
        yield kind(
            model, backend="causal", tokenizer=tokenizer, batch_size=batch, max_length=_LENGTH
        )


@contextmanager
def qoff_model(checkpoint: Path, memory: int) -> Iterator[Any]:
    """qoff's model for the harness."""
    kind = extra("qoff.eval.tasks.harness").QoffLM
    lm = kind(str(checkpoint), device="cpu", device_memory=memory, kv=None, max_length=_LENGTH)
    with closing(lm.model):
        yield lm


def largest_batch(
    checkpoint: Path, memory: int, task: str, manager: Any, weights: int
) -> tuple[int, Run]:
    """The largest batch that the harness's `hf` model has room for, and its run.

    Raises BudgetError where one sequence has none.
    """
    for batch in _BATCHES:
        try:
            with hf_model(checkpoint, memory, batch) as lm:
                return batch, run_task(lm, task, manager, weights)
        except BudgetError:
            if batch == _BATCHES[-1]:
                raise
    raise AssertionError


def measure(checkpoint: Path, share: float, count: int, rounds: int, report: Report) -> list[str]:
    """Run both tasks both ways; fills a report, and returns in what scores are not equal."""
    layout = Checkpoint.open(checkpoint)
    weights = sum(file.stat().st_size for file in layout.path.glob("*.safetensors"))
    memory, unequal = int(share * weights), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        make_tasks(Path(folder), count, read_text())
        manager = manager_of(TASKS, [folder])
        for task in TASKS:
            batch, first = largest_batch(checkpoint, memory, task, manager, weights)
            runs: dict[str, list[Run]] = {f"hf, batch {n}": [] for n in dict.fromkeys((1, batch))}
            runs["qoff"] = []
            for _ in range(rounds):
                for name, found in runs.items():
                    way = qoff_model(checkpoint, memory)
                    if name != "qoff":
                        way = hf_model(checkpoint, memory, int(name.split()[-1]))
                    with way as lm:
                        found.append(run_task(lm, task, manager, weights))
            for one in chain(*runs.values()):
                unequal += [f"{task}: {text}" for text in differences(first, one)]
            _add(report, task, runs)
    return unequal


def _add(report: Report, task: str, runs: dict[str, list[Run]]) -> None:
    """The rows, figures and bar of a task."""
    rates = {name: median(one.rate for one in found) for name, found in runs.items()}
    before, ours = "hf, batch 1", runs["qoff"]
    ratio = rates["qoff"] / rates[before]
    for name, found in runs.items():
        seconds, swept = (median(getattr(x, key) for x in found) for key in ("seconds", "swept"))
        times = f"{rates[name] / rates[before]:.2f}"
        row = (f"{rates[name]:.2f}", f"{seconds:.2f}", f"{swept:.1f}", times)
        report.rows.append((f"{task}, {name}", *row))
        spread = [one.rate for one in found]
        report.measured[f"{task}, {name}"] = {"samples_per_s": spread, "weights_read": swept}
    report.measured[f"{task}, metrics"] = ours[0].metrics
    report.ratios |= {
        f"{task}, qoff over {name}": rates["qoff"] / rate
        for name, rate in rates.items()
        if name != "qoff"
    }
    report.bars.append(Bar(f"{task}: samples/s, times the harness's default", _WANTED, ratio))
    far = max(farthest(runs[before][0], one) for one in ours)
    said = f"log-probabilities differ by {far:.1e} nats at most" if far else "the same answers"
    report.notes.append(f"{task}: {said}; {ours[0].metrics}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench; ends with status 1 where scores are not equal."""
    args = arguments(
        __doc__,
        argv,
        model=(str, "", "a qoff checkpoint; by default the demo's"),
        memory=(float, 0.3, "device memory, of the weights' bytes"),
        documents=(int, 64, "of each task"),
        rounds=(int, 3, "of each way"),
    )
    count, rounds = (8, 1) if args.quick else (args.documents, args.rounds)
    if args.memory <= 0 or rounds < 1:
        raise ArgumentError("--memory is above 0, and --rounds 1 at least")
    extra("lm_eval")
    checkpoint = Path(args.model) if args.model else fetch_checkpoint()
    settings = {"model": checkpoint.name, "memory": args.memory, "documents": count,
                "rounds": rounds, "words": [_PASSAGE, _ENDING], "new_tokens": _NEW}  # fmt: skip
    report = Report(
        "lm_eval",
        settings,
        f"lm_eval with device memory for {args.memory:.0%} of the weights, {count} documents",
        ("task, model", "samples/s", "s", "times the weights read", "times hf"),
        unit="samples/s",
    )
    unequal = measure(checkpoint, args.memory, count, rounds, report)
    report.notes += [f"NOT EQUAL: {text}" for text in unequal]
    report.publish(args.out)
    if unequal:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except QoffError as error:
        sys.exit(f"lm_eval: {error}")
