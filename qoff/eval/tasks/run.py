"""Tasks of lm-evaluation-harness on a qoff model; those in `task_data` need no network."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import Any

from qoff.errors import ArgumentError, QoffError
from qoff.eval.extras import errors_only, extra, lines_for_bars, replaced
from qoff.measure import tables

OWN_TASKS = Path(__file__).resolve().parents[1] / "task_data"
_NAMED = re.compile(
    rb"""^\s*(?:- )?["']?(?:task|group|tag)["']?: *["']?([\w.-]+)""", re.MULTILINE
)  # what files of tasks define
_RESAMPLES = 1000  # for errors of metrics that are no means


def run_tasks(
    model_path: str | PathLike[str],
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    pass_tokens: int = 256,
    max_length: int | None = None,
    chat: bool = False,
    seed: int = 0,
    include_path: str | PathLike[str] | None = None,
    manager: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness, by name, tag or group, on the model of a path.

    model_path, options (device, device_memory, host_memory, kv, ...): as for `qoff.load`. limit:
    documents of each task, the first ones. num_fewshot: examples before each question; None: as the
    task says. batch_size, pass_tokens, max_length: see `harness.QoffLM`. chat: through the model's
    chat template. seed: of what examples are drawn. include_path: a folder with more tasks.
    manager: of `manager_of`, which takes long, if there is one already.

    Returns "results", {task: {metric: value}}, errors as "metric_stderr", None where all documents
    come out alike, which do not tell it; "samples", documents by task; "versions" of the tasks;
    "higher_is_better"; and what was asked. Raises QoffError where lm-eval is not installed or a
    task's data cannot be read, ArgumentError for an unknown task and numbers out of range, and the
    errors of `qoff.load`.
    """
    for name, value, least in (("limit", limit, 1), ("num_fewshot", num_fewshot, 0)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ArgumentError(f"{name} is {value!r}; use a whole number from {least}, or None")
    if manager is None:
        manager = manager_of(tasks, [] if include_path is None else [include_path])
    chosen: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "chat": chat}
    chosen["seed"] = seed
    sizes = {"batch_size": batch_size, "pass_tokens": pass_tokens, "max_length": max_length}
    lm = extra("qoff.eval.tasks.harness").QoffLM(str(model_path), **sizes, **options)
    with closing(lm.model):
        found = evaluate(lm, tasks, manager, **chosen)
    plain = {  # as JSON takes them
        name: value if isinstance(value, bool | int | float | None) else str(value)
        for name, value in options.items()
    }
    asked = {**chosen, **sizes, "batch_size": lm.batch_size, "max_length": lm.max_length, **plain}
    return {"model": str(model_path), "tasks": list(tasks), "settings": asked, **found}


def evaluate(
    lm: Any,
    tasks: Sequence[str],
    manager: Any,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """As `run_tasks`, on any model of the harness; manager: of `manager_of`."""
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    simple_evaluate = extra("lm_eval").simple_evaluate
    try:
        # The task module warns of what loads our tasks' data; git is asked for a version.
        with (
            errors_only("lm_eval.api.task"),
            lines_for_bars(),
            replaced(extra("lm_eval.evaluator"), "get_git_commit_hash", lambda: None),
        ):
            found = simple_evaluate(
                lm,
                tasks=list(tasks),
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=chat,
                task_manager=manager,
                bootstrap_iters=_RESAMPLES,
                log_samples=False,
                **dict.fromkeys(seeds, seed),
            )
    except QoffError:
        raise
    except ValueError as error:
        if num_fewshot is None or "Sample larger than population" not in str(error):
            raise
        raise ArgumentError(
            f"a task has fewer documents than the {num_fewshot} examples asked for before each "
            "question (--shots); ask for fewer"
        ) from error
    except OSError as error:  # among them what the hub's client and `datasets` raise
        reason = " ".join(str(error).split())
        raise QoffError(
            f"the data of a task cannot be read ({reason}); check the network and the task's name "
            "for its data"
        ) from error
    return {
        "results": {task: _metrics(values) for task, values in found["results"].items()},
        "samples": {task: counts["effective"] for task, counts in found["n-samples"].items()},
        "versions": dict(found["versions"]),
        "higher_is_better": found["higher_is_better"],
        "lm_eval": extra("lm_eval").__version__,
    }


def manager_of(tasks: Sequence[str], folders: Sequence[str | PathLike[str]] = ()) -> Any:
    """The harness's task manager with these tasks: qoff's, those of folders, then its own.

    Raises ArgumentError for a name that there is not, with those that are nearest, and QoffError
    where lm-eval is not installed.
    """
    if not all(tasks) or not tasks:
        raise ArgumentError(
            "a task has no name (--tasks); name one at least, like qoff_knowledge, and separate "
            "names by commas"
        )
    managers = extra("lm_eval.tasks")
    paths = [OWN_TASKS, *map(Path, folders)]
    manager = managers.TaskManager(include_path=paths, include_defaults=False)
    others = [name for name in tasks if name not in manager.all_tasks]
    if others:
        # To load its own takes 15 s; a name that none of the files has is refused in one.
        files = Path(managers.manager.__file__).parent.rglob("*")
        texts = (file.read_bytes() for file in files if file.is_file() and file.suffix != ".pyc")
        text = b"\n".join(texts)
        named = {name.decode() for name in _NAMED.findall(text)}.union(manager.all_tasks)
        _check_known([x for x in others if x.encode(errors="replace") not in text], named)
        manager = managers.TaskManager(include_path=paths)
        _check_known(others, manager.all_tasks)
    return manager


def _check_known(names: Sequence[str], known: Collection[str]) -> None:
    """Raise ArgumentError for a name that is not among the known ones."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"the nearest names are {', '.join(near)}" if near else "no name is like it"
            raise ArgumentError(f"there is no task {name!r}; {hint}")


def markdown(found: Mapping[str, Any]) -> str:
    """The results of `run_tasks` as a table."""
    rows = []
    for task, metrics in found["results"].items():
        for metric, value in metrics.items():
            if not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr")
                spread = "-" if error is None else f"{error:.4f}"
                count = str(found["samples"].get(task, "-"))
                rows.append((task, metric, f"{value:.4f}", spread, count))
    header = ("task", "metric", "value", "error", "documents")
    return tables.markdown(header, rows, right=3) + "\n"


def _metrics(values: Mapping[str, Any]) -> dict[str, float | None]:
    """ "acc,none" -> "acc"; metrics behind another filter keep its name.

    An error of 0 is None: where all documents come out alike, they do not tell it.
    """
    found: dict[str, float | None] = {}
    for name, value in values.items():
        metric, _, kind = name.partition(",")
        if isinstance(value, int | float) and kind:
            known = float(value) if value > 0 or not metric.endswith("_stderr") else None
            found[metric if kind == "none" else f"{metric} ({kind})"] = known
    return found
