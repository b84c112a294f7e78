"""The server's `qoff.LLM`: a bounded queue before it, one thread that computes."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from qoff.api.errors import ApiError, ClientGone
from qoff.engine import LLM, Completion, Logprob, PoolingParams, SamplingParams
from qoff.engine.calls import Vectors
from qoff.engine.prompts import Chat, prompt_list
from qoff.engine.request import Sequence

from .batches import Batches
from .bell import Bell
from .metrics import Metrics
from .stats import memory, recent

_T = TypeVar("_T")
_READERS = 2  # threads that turn prompts into tokens
LARGE = 64 << 10  # bytes; what a larger body needs done waits for its like, and others not for it
_is_large: ContextVar[bool] = ContextVar("is_large", default=False)  # the request of this task


@dataclass(frozen=True)
class Piece:
    """What a round added to an answer. number: of the answer, those of a prompt together."""

    number: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, Logprob], ...]  # of these tokens, where asked for
    answer: Completion | None  # when it is done


class Answers(Vectors):
    """The answers to a request's prompts, n for each, as they come into the loop of `bell`."""

    follows = math.inf

    def __init__(self, prompts: int, n: int, deadline: float, bell: Bell) -> None:
        super().__init__()
        self.count, self._n = prompts * n, n
        self.prompt_tokens = 0  # of all prompts
        self.prompt: tuple[int, ...] = ()  # the one that was answered last; a chat has one
        self._deadline = deadline  # of the loop's clock
        self._bell = bell
        self._news = asyncio.Event()
        self._pieces: deque[Piece] = deque()
        self._seen: dict[int, int] = {}  # tokens of each answer that has begun
        # When each had a place and its first token, by `time.perf_counter`.
        self.times: dict[int, tuple[float, float]] = {}
        self.started = time.perf_counter()

    def grew(self, sequence: Sequence, answer: Completion | None) -> None:
        super().grew(sequence, answer)
        number = sequence.index * self._n + sequence.sample
        seen = self._seen.get(number, 0)
        tokens = sequence.answer if answer is None else answer.token_ids
        new = tuple(tokens[seen:])
        if not new and answer is None:
            return
        if new and not seen and sequence.placed is not None:
            self.times[number] = sequence.placed, time.perf_counter()
        self._seen[number], self.prompt = seen + len(new), sequence.prompt
        logprobs = tuple(sequence.logprobs[seen : seen + len(new)])
        self._pieces.append(Piece(number, new, logprobs, answer))
        self._bell.ring(self._news)

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        self._bell.ring(self._news)

    @property
    def need_together(self) -> int:
        """Places that it still needs in one batch of the plan; 0 once all answers have begun."""
        return self._n if len(self._seen) < self.count else 0

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is new, until all answers are done.

        Raises TimeoutError at the deadline, ClientGone, and what failed in a round.
        """
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self.left -= piece.answer is not None
                yield piece
            if self.error is not None:
                raise self.error
            if not self.left:
                return
            async with asyncio.timeout_at(self._deadline):
                await self._news.wait()
            self._news.clear()


class Engine:
    """What requests are given to. max_queue: answers that may wait for a place in a batch.

    batches: what it computes where there is room beside these requests.

    It takes requests between `start` and `stop`. All but these two are for one event loop.
    """

    def __init__(
        self, name: str, max_queue: int, timeout_s: float, batches: Batches | None = None
    ) -> None:
        self.name, self._timeout_s = name, timeout_s
        self._max_queue, self.batches = max_queue, batches
        self.llm: LLM | None = None
        self.metrics = Metrics(name)
        self._running: dict[Answers, int] = {}  # with how many answers each
        self._stopped = False
        self._bell: Bell | None = None  # of the event loop, once somebody has asked
        self._thread: threading.Thread | None = None
        self._readers = ThreadPoolExecutor(_READERS, "qoff-serve-reader")
        self._large = ThreadPoolExecutor(1, "qoff-serve-large")  # its work takes seconds
        self._texts = 0  # that are turned into tokens for clients, or back, or wait for that
        self._disk = ThreadPoolExecutor(1, "qoff-serve-disk")  # its waits are no reader's
        self._lasts_s = 1.0  # an answer, lately
        self.failure: BaseException | None = None
        self.ended = threading.Event()  # it has failed, and computes no more

    def start(self, llm: LLM) -> None:
        """Compute what is asked for from now on."""
        self.llm = llm
        self.metrics.follow(
            lambda: self._running_of(llm.waiting), lambda: llm.waiting, lambda: llm.kv_used
        )
        self.metrics.tell(llm)
        self._thread = threading.Thread(target=self._work, name="qoff-serve-engine")
        self._thread.start()
        if self.batches is not None:
            self.batches.start(llm, self._room_for_batches, self.places, self.metrics.count)

    def stop(self) -> None:
        """Compute no more, after the present round; its threads end. Closes the LLM."""
        self._stopped = True
        self._readers.shutdown(cancel_futures=True)
        self._large.shutdown(cancel_futures=True)
        self._disk.shutdown(cancel_futures=True)
        if self.batches is not None:
            self.batches.stop()
        if self.llm is not None:
            self.llm.wake()
            assert self._thread is not None
            self._thread.join()
            self.llm.close()

    def _work(self) -> None:
        assert self.llm is not None
        try:
            self.llm.work(self._told_to_stop)
        except BaseException as error:
            self.failure = error
            self.ended.set()

    def _told_to_stop(self) -> bool:
        """Whether the thread is to end. Asked before each round: those before it are counted."""
        assert self.llm is not None
        self.metrics.count_rounds(self.llm.rounds)
        return self._stopped

    def ready(self) -> LLM:
        """The model. Raises ApiError while it is loading, and when the server is stopping."""
        if self._stopped or self.failure is not None:
            raise ApiError(503, "the server is stopping", code="stopping")
        if self.llm is None:
            headers = {"Retry-After": "5"}
            raise ApiError(503, "the model is loading", code="loading", headers=headers)
        return self.llm

    def stats(self) -> dict[str, Any]:
        """What `/stats` says; see docs/serving.md."""
        found: dict[str, Any] = {"model": self.name, "state": "loading"}
        if self._stopped or self.failure is not None:
            return found | {"state": "stopping"}
        if (llm := self.llm) is None:
            return found
        waiting, began = llm.waiting, llm.round_began
        return found | {
            "state": "reopening" if llm.reopening else "ready",
            "context": llm.plan.context,
            "answers": {
                "running": self._running_of(waiting),
                "places": self.places,
                "waiting": waiting,
                "queue": self._max_queue,
            },
            "kv_used": llm.kv_used,
            "recent": recent(llm.rounds, time.perf_counter(), began),
            "memory": memory(llm),
        }

    @property
    def places(self) -> int:
        """Answers that are computed at the same time, at most."""
        assert self.llm is not None
        return self.llm.plan.batches * self.llm.plan.batch_size

    @property
    def in_flight(self) -> int:
        """Answers that were asked for and are not done; what a slow reader has not read is."""
        return sum(count - len(one.done) for one, count in list(self._running.items()))

    def _running_of(self, waiting: int) -> int:
        """Answers that are computed; those of clients that have gone wait until the round ends."""
        theirs = 0 if self.batches is None else self.batches.in_flight
        return max(0, self.in_flight + theirs - waiting)

    def _room_for_batches(self, theirs: int) -> int:
        """For how many more answers of batches; below 0: so many are in the way of requests.

        Where there are no requests, as many wait as are computed: places are never empty. Answers
        of a prompt need places in one of the plan's batches: so many more are kept free for them
        that one has enough, wherever the free places are.
        """
        if waiting := self.in_flight:
            assert self.llm is not None
            together = max((one.need_together for one in list(self._running)), default=0)
            apart = (self.llm.plan.batches - 1) * max(0, together - 1)
            return self.places - waiting - apart - theirs
        most = 0 if self.batches is None else self.batches.most  # answers of one of their requests
        return max(0, max(2 * self.places, most) - theirs)

    def _changed(self) -> None:
        if self.batches is not None:
            self.batches.poke()

    def _check_room(self, answers: int) -> None:
        """Raise ApiError 429 where so many more do not fit the queue, 400 where they never do."""
        most = self.places + self._max_queue
        if not 0 < answers <= most:
            raise ApiError(400, f"the request is for {answers} answers; ask for 1 to {most}")
        wait = self.in_flight + answers - self.places
        if wait > self._max_queue:
            after = math.ceil(self._lasts_s * (1 + wait / self.places))
            raise self._full(f"{self.in_flight} answers are being computed or wait", after)

    def _full(self, why: str, after_s: int) -> ApiError:
        self.metrics.refused.inc()
        return ApiError(
            429,
            f"{why}, and no more than {self._max_queue} may wait; try again later",
            code="queue_full",
            headers={"Retry-After": str(min(max(1, after_s), 600))},
        )

    @asynccontextmanager
    async def answering(
        self,
        prompts: str | list[Any] | Chat,
        params: SamplingParams | PoolingParams,
        receive: Receive,
        adapter: str | None = None,
    ) -> AsyncIterator[Answers]:
        """Have prompts answered. Leaving gives up what is not done; so does a client that hangs up.

        Raises ApiError 429 where the queue is full, and ArgumentError for a prompt that cannot be
        answered.
        """
        llm, found = self.ready(), await self._unless_small(lambda: prompt_list(prompts))
        count = len(found)
        self._check_room(count * params.n)
        loop = asyncio.get_running_loop()
        if self._bell is None:
            self._bell = Bell(loop)
        answers = Answers(count, params.n, loop.time() + self._timeout_s, self._bell)
        self._running[answers] = answers.count
        self._changed()
        read = loop.run_in_executor(self._lane(), llm.submit, found, params, answers, adapter)
        watcher = asyncio.create_task(_watch(receive, answers))
        try:
            answers.prompt_tokens = sum(await asyncio.shield(read))
            yield answers
        finally:
            watcher.cancel()
            if read.done():
                self._leave(answers)
            else:
                read.add_done_callback(lambda _: self._leave(answers))

    def _leave(self, answers: Answers) -> None:
        """A request is over; what is not computed of it gives up its place within a round."""
        del self._running[answers]
        self._changed()
        if answers.left and self.llm is not None:
            self.llm.cancel(answers)
        if len(answers.done) == answers.count:  # else it was refused, or given up
            spent = time.perf_counter() - answers.started
            self._lasts_s += 0.1 * (spent - self._lasts_s)

    async def of_body(self, nbytes: int, work: Callable[[], _T]) -> _T:
        """What a function makes of a request's body of so many bytes; of a large one in a thread.

        Whatever else this request needs done has that thread, too.
        """
        _is_large.set(nbytes > LARGE)
        return await self._unless_small(work)

    async def _unless_small(self, work: Callable[[], _T]) -> _T:
        return await self.beside(work) if _is_large.get() else work()

    def _lane(self) -> ThreadPoolExecutor:
        return self._large if _is_large.get() else self._readers

    async def beside(self, work: Callable[[], _T]) -> _T:
        """What a function returns, computed in a thread beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._lane(), work)

    async def in_turn(self, work: Callable[[], _T]) -> _T:
        """The same of what few may wait for. Raises ApiError 429 where as many do as may."""
        if self._texts >= _READERS + self._max_queue:
            raise self._full(f"{self._texts} texts are being read or wait", 1)
        self._texts += 1
        try:
            return await self.beside(work)
        finally:
            self._texts -= 1

    async def on_disk(self, work: Callable[[], _T]) -> _T:
        """The same of a function that waits for the disk; these take turns."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


async def _watch(receive: Receive, answers: Answers) -> None:
    """Have answers fail when the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answers.failed(ClientGone())
