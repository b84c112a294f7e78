"""`qoff serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typer import Context, Option

from qoff.errors import ArgumentError, QoffError
from qoff.units import parse_size

from .batch import PlanOptions
from .command import command, parsed
from .options import CacheOptions, Model, RunOptions, model_name

if TYPE_CHECKING:
    from qoff.plan import Plan


@dataclass(frozen=True)
class ServeRunOptions(RunOptions):
    """The same; how far something is goes to the server's log."""

    def progress(
        self, what: str, quiet: bool = False
    ) -> AbstractContextManager[Callable[[int, int], None]]:
        from qoff.serve.logs import logged_progress

        return logged_progress(what)


@dataclass(frozen=True)
class ServePlanOptions(PlanOptions):
    """The same, with prompts read in smaller pieces: others' answers go on meanwhile."""

    free: ClassVar[frozenset[str]] = PlanOptions.free | {"least_prefill_tokens"}
    least_prefill_tokens: int = Option(
        256, min=1, help="--prefill-tokens where more would make rounds longer, as forecast."
    )

    def plan(
        self, called: Context, model: str, how: RunOptions, cache: CacheOptions
    ) -> tuple[Plan | None, dict[str, Any]]:
        """As of a batch; of a saved plan pieces may be smaller than it says."""
        plan, opening = PlanOptions.plan(self, called, model, how, cache)
        if plan is not None and plan.least_prefill_tokens is None:
            plan = replace(plan, least_prefill_tokens=self.least_prefill_tokens)
        return plan, opening


@command
def serve(
    called: Context,
    model: Model,
    how: ServeRunOptions,
    cache: CacheOptions,
    planned: ServePlanOptions,
    host: str = Option("127.0.0.1", help="Address to listen on; 0.0.0.0: all."),
    port: int = Option(8000, min=0, max=65535, help="Port; 0: any free one."),
    served_model_name: str | None = Option(
        None, help="The model's name for clients; default: that of MODEL."
    ),
    api_key: list[str] | None = Option(
        None, envvar="QOFF_API_KEY", help="Key that clients must send; repeatable."
    ),
    ssl_certfile: Path | None = Option(
        None, exists=True, dir_okay=False, help="PEM certificate, for TLS."
    ),
    ssl_keyfile: Path | None = Option(None, exists=True, dir_okay=False, help="PEM key, for TLS."),
    cors_origin: list[str] | None = Option(
        None, help="Origin whose pages may send requests, like https://example.com; repeatable."
    ),
    files: Path | None = Option(
        None, help="Folder for files and batches; default: one per model in ~/.cache/qoff."
    ),
    max_file_size: str = Option("200MiB", help="Largest uploaded file."),
    max_files_size: str = Option("10GiB", help="Largest total size of files."),
    reasoning_format: Literal["auto", "none"] = Option(
        "auto", help="none: leave thinking in content, with its marks."
    ),
    max_queue: int = Option(64, min=0, help="Answers that may wait; more get status 429."),
    max_connections: int = Option(1024, min=1, help="Most open connections."),
    max_request_size: str = Option("4MiB", help="Largest body of a request."),
    request_timeout: float = Option(600, min=0.1, help="Seconds for a whole answer."),
    read_timeout: float = Option(20, min=0.1, help="Seconds for a client to send or read."),
    shutdown_timeout: float = Option(
        10, min=0.1, help="Seconds for open answers when the server stops."
    ),
    log_level: Literal["info", "warning", "error"] = Option(
        "info", help="Lowest level that is logged."
    ),
) -> None:
    """Serve OpenAI's API over HTTP: chat, completions, embeddings, batches.

    The log is one line of JSON per request, on standard error. SIGTERM or Ctrl-C stops the server.
    """
    try:
        from qoff.serve.batches import open_batches
        from qoff.serve.engine import Engine
        from qoff.serve.logs import logging_to_stderr
        from qoff.serve.options import ServeOptions
        from qoff.serve.server import serve as run
    except ModuleNotFoundError as error:
        raise QoffError(
            f"the server needs {error.name}, which is not installed; pip install 'qoff[serve]'"
        ) from error
    from qoff.engine import LLM

    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise ArgumentError("TLS needs both --ssl-certfile and --ssl-keyfile")
    if "" in (api_key or ()):
        raise ArgumentError("an API key is empty; leave --api-key out, or give one")
    if any(x.isspace() or not x.isprintable() for key in api_key or () for x in key):
        raise ArgumentError("an API key has blanks or control characters; clients cannot send it")
    _check_origins(cors_origin or ())
    request_bytes = parsed("--max-request-size", parse_size, max_request_size)
    sizes = (
        parsed("--max-file-size", parse_size, max_file_size),
        parsed("--max-files-size", parse_size, max_files_size),
    )
    options = ServeOptions(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        tls_certificate=None if ssl_certfile is None else str(ssl_certfile),
        tls_key=None if ssl_keyfile is None else str(ssl_keyfile),
        thinking=reasoning_format != "none",
        max_queue=max_queue,
        max_connections=max_connections,
        max_request_bytes=request_bytes,
        request_timeout_s=request_timeout,
        read_timeout_s=read_timeout,
        shutdown_timeout_s=shutdown_timeout,
    )
    name = served_model_name or model_name(model)
    atexit.register(_collect_no_more)
    with logging_to_stderr(log_level), ExitStack() as ends:
        plan, opening = planned.plan(called, model, how, cache)
        how.check_source(model)
        batches = open_batches(files, name, *sizes, options.thinking)
        if batches is not None:
            ends.callback(batches.stop)
        engine = Engine(name, options.max_queue, options.request_timeout_s, batches)

        def open_llm() -> LLM:  # a conversion takes minutes, in which clients are told to wait
            return LLM(how.checkpoint(model), plan, **opening, _grammars=True)

        run(open_llm, engine, options)


def _check_origins(origins: Sequence[str]) -> None:
    """Refuse what no browser sends as an origin, so that it would let nobody ask."""
    for origin in origins:
        scheme, _, place = origin.partition("://")
        if origin not in ("*", "null") and not (scheme and place and "/" not in place):
            raise ArgumentError(
                f"--cors-origin {origin}: an origin is written like https://example.com, "
                "without a path; * lets all pages ask"
            )


def _collect_no_more() -> None:
    """Spare the end of the process the collection of torch's modules, which takes it seconds.

    Triton's bindings would print what was not collected.
    """
    if "triton" not in sys.modules:
        gc.freeze()
