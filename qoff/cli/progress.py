"""How far a job, a training or an evaluation is: a bar in terminals, elsewhere a line at times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from qoff.eval.perplexity.scoring import Tell
    from qoff.jobs.runner import Counts
    from qoff.train.logs import Told

_EACH_S = 10.0  # a line, where there is no terminal


@contextmanager
def job_progress(total: int | None, quiet: bool) -> Iterator[Callable[[Counts], None]]:
    """Yield a function that shows, on standard error, what a job has done of `total` requests."""
    with _showing(total, quiet) as show:
        yield lambda counts: show(_words(counts, total), counts.skipped + counts.ended)


@contextmanager
def step_progress(before: int, total: int) -> Iterator[Callable[[Told], None]]:
    """Yield a function that shows a step of training, of `total`; `before` were done."""
    start = time.perf_counter()
    with _showing(total, quiet=False) as show:

        def tell(told: Told) -> None:
            each = (time.perf_counter() - start) / (told.step - before)
            show(
                f"step {told.step:,} of {total:,}, loss {told.loss:.4f}, {_held_out(told)}"
                f"{told.tokens_per_s:,.0f} tokens/s, {duration((total - told.step) * each)} left",
                told.step,
            )

        yield tell


def _held_out(told: Told) -> str:
    return "" if told.held_out_loss is None else f"held out {told.held_out_loss:.4f}, "


@contextmanager
def score_progress(what: str) -> Iterator[Tell]:
    """Yield a function that shows how many tokens are scored, and what that has come to.

    Those that were done before count as done, not for the time that is left.
    """
    from qoff.eval.perplexity.metrics import Scores, summarize

    begun: tuple[float, int] | None = None
    said: tuple[Scores | None, str] = (None, "")
    with _showing(None, quiet=False) as show:

        def tell(done: int, total: int, scores: Scores | None) -> None:
            nonlocal begun, said
            now = time.perf_counter()
            begun = begun or (now, done)  # the first piece is not in the rate
            if scores is not None and scores is not said[0]:
                found = summarize(scores)
                far = "" if found.divergence is None else f", KL {found.divergence.mean_kl}"
                said = scores, f", perplexity {found.perplexity}{far}"
            words = f"{what}: {done:,} of {total:,} tokens{said[1]}"
            if done > begun[1]:
                left = (total - done) * (now - begun[0]) / (done - begun[1])
                words += f", {duration(left)} left"
            show(words, done, total)

        yield tell


@contextmanager
def _showing(total: int | None, quiet: bool) -> Iterator[Callable[..., None]]:
    """Yield a function that shows words, how many are done and, if it is known now, of how many."""
    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
    task, said = bar.add_task("", total=total), time.monotonic()

    def show(text: str, done: int, whole: int | None = total) -> None:
        nonlocal said
        if not bar.disable:
            bar.start()
            bar.update(task, completed=done, total=whole, description=text)
        elif not quiet and (time.monotonic() - said > _EACH_S or done == whole):
            said = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def _words(counts: Counts, total: int | None) -> str:
    seconds = max(1e-6, time.perf_counter() - counts.started)
    done = counts.skipped + counts.ended
    left = "" if total is None else duration((total - done) * seconds / max(1, counts.ended))
    return (
        f"{done:,} of {'?' if total is None else f'{total:,}'} done, {counts.failed:,} failed, "
        f"{counts.tokens / seconds:,.0f} tokens/s" + (f", {left} left" if left else "")
    )


def duration(seconds: float) -> str:
    """Seconds as text, in the unit that reads best."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
