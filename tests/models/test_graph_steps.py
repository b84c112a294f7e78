"""Steps that follow a recorded one on a GPU give the tokens that one after another does.

Where there is no GPU, `tests.tape` records instead of CUDA, and Triton interprets the kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.distribution import Choice, Shape
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.sampling import likeliest
from qoff.kvcache.device.cache import DeviceCachePass
from qoff.models.forward_pass import ForwardPass
from qoff.models.native import following
from qoff.models.native.graph_steps import GraphSteps
from qoff.models.native.graphs import Replays
from qoff.models.runtime import Runtime
from tests.models.test_replays import CPU, SLOTS, Run, tape, triton_ops
from tests.models.test_triton_decoder import KV8, checkpoint, interpreted

PROMPTS = (74, 5, 79, 4)  # tokens; with a window of 16 a block is complete at 80
STEPS = 100
ALL, SOME = (0, 1, 2, 3), (0, 2, 3)


class Undone(TorchDispatchMode):
    """What torch's operations write is as it was, afterwards: a CUDA graph is recorded unrun."""

    def __enter__(self) -> Undone:
        self._were: list[tuple[Tensor, Tensor]] = []
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for written, before in reversed(self._were):
            written.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given, said in zip(args, func._schema.arguments, strict=False):
            if said.alias_info is not None and said.alias_info.is_write:
                self._were.append((given, given.clone()))
        return func(*args, **(kwargs or {}))


class Recorder:
    """Records on a CPU, and counts what is launched."""

    def __init__(self) -> None:
        self.launches = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        with Undone():
            replay = tape.record(work)

        def launched() -> None:
            self.launches += 1
            with _disable_current_modes():
                replay()

        return launched


class Host(TorchDispatchMode):
    """Counts torch's operations that are not part of a recording."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.operations[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Steps(Run):
    """A model with a cache, behind prompts that all of these have the same K and V of."""

    def __init__(self, path: Path, record: Recorder | None = None) -> None:
        replays = None if record is None else Replays(CPU, record)
        super().__init__(path, replays, resident=True)
        self.replays, self.at_once = replays, list[int]()
        random = torch.Generator().manual_seed(0)
        self.cache.lengths[:] = PROMPTS
        for ring in self.cache.rings.all:
            ring.normal_(generator=random)

    def next_pass(self, slots: Sequence[int], tokens: Tensor) -> ForwardPass:
        spans = (Span(slot, row, 1, self.cache.lengths[slot]) for row, slot in enumerate(slots))
        ragged = Ragged(tuple(spans))
        return ForwardPass(tokens, ragged, self.cache, ragged.last_rows)

    def tokens(
        self,
        slots: Sequence[int],
        count: int,
        choice: Choice | None = None,
        most: int = 8,
        first: Sequence[int] = (5, 6, 7, 8),
    ) -> list[list[int]]:
        """The tokens of so many steps, of several together where that can be."""
        found, tokens = list[list[int]](), torch.tensor(first[: len(slots)])
        while len(found) < count:
            run, more = self.next_pass(slots, tokens), list[list[int]]()
            if choice is not None:
                wanted = choice, min(most, count - len(found))
                more = self.run.decoder.follow_with_tokens(run, *wanted)
                self.at_once.append(len(more))
            found += more or [likeliest(self.run.forward(run))]
            tokens = torch.tensor(found[-1])
        return found


def attention(qkv: Tensor, shape: HeadShape, cache: DeviceLayerCache, *_: Any, **__: Any) -> Tensor:
    """Decode attention that reads all that kernels are told of a step, in few operations of torch.

    What it makes of packed blocks is not what these mean.
    """
    step, ring, slots = cache.step, cache.recent_k.shape[1], torch.arange(len(cache.recent_k))
    there, last = step.length > 0, (step.length - 1).clamp(min=0)
    rows = step.row_start[:-1].clamp(max=len(qkv) - 1).long()
    query, *new = qkv.unflatten(1, (-1, shape.head_dim)).split(
        [shape.heads, shape.kv_heads, shape.kv_heads], dim=1
    )
    for recent, x in zip((cache.recent_k, cache.recent_v), new, strict=True):
        old, one = recent[slots, last.long() % ring], there[:, None, None]
        recent[slots, last.long() % ring] = torch.where(one, x[rows], old)
    at = last[:, None] - (last[:, None] - torch.arange(ring)) % ring  # positions in the ring
    seen = (at >= step.packed[:, None]) & there[:, None]
    group = shape.heads // shape.kv_heads
    k, v = (x.repeat_interleave(group, 2).float() for x in (cache.recent_k, cache.recent_v))
    scores = torch.einsum("shd,swhd->shw", query[rows].float(), k) * shape.scale
    weights = scores.masked_fill(~seen[:, None], -1e9).softmax(-1)
    found = torch.einsum("shw,swhd->shd", weights, v.where(seen[..., None, None], 0))
    if len(cache.pool):
        blocks = cache.pool[step.table.long()].float().mean((2, 3))  # [S, columns]
        packed = torch.arange(blocks.shape[1]) * BLOCK_TOKENS < step.packed[:, None]
        found = found + (blocks * packed).sum(1)[:, None, None] / 128
    for slot in range(len(slots)) if step.max_new_blocks else ():
        first = step.packed[slot : slot + 1] // BLOCK_TOKENS
        number = step.table[slot].long().gather(0, first.long())
        fresh = (cache.recent_k[slot].float().sum() * 16).long().remainder(256).to(torch.uint8)
        new_one = step.after[slot] > step.packed[slot]
        cache.pool[number] = torch.where(new_one, fresh, cache.pool[number])
    of_rows = found if step.slots is None else found[step.slots]
    of_rows = of_rows * (1 + step.positions[:, None, None] % 7)
    return of_rows.flatten(1).to(qkv.dtype)


@pytest.fixture(autouse=True)
def any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "HEARD_S", 1e9)


def w4_linear(
    x: Tensor,
    weight: QTensor,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    scratch: object = None,
    **rest: Any,
) -> Tensor:
    y = reference_ops.w4_linear(x.float(), weight, **rest)
    y = (y if residual is None else y + residual).to(x.dtype)
    return y if out is None else out.copy_(y)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels only those of attention and cache are interpreted."""
    monkeypatch.setattr("qoff.kvcache.device.tables._STEADY_BLOCKS", 4)
    monkeypatch.setattr(triton_ops, "w4_linear", w4_linear)


@pytest.fixture
def few_operations(few_programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is interpreted."""
    monkeypatch.setattr(triton_ops, "attention", attention)


@interpreted
@pytest.mark.parametrize(("family", "slots"), [("llama", ALL), ("opt", SOME), ("gemma2", SOME)])
def test_tokens_do_not_depend_on_how_many_steps_are_done_at_once(
    family: str, slots: Sequence[int], tmp_path: Path, few_operations: None
) -> None:
    """Over blocks that are completed, with a sequence that waits, padded rows; then with it.

    Of models with learned positions, and with two groups of layers and scaled logits.
    """
    path = checkpoint(tmp_path, family)
    for most in (3, 64):
        plain, run = Steps(path), Steps(path, Recorder())
        for now, count in ((slots, STEPS), (ALL, 4)):
            assert run.tokens(now, count, Choice(), most) == plain.tokens(now, count)
            assert run.cache.lengths == plain.cache.lengths
            assert run.cache.packed == plain.cache.packed
        assert min(most, 50) <= max(run.at_once) <= most
        assert sum(run.at_once) >= STEPS // 2


@pytest.fixture
def llama(tmp_path_factory: pytest.TempPathFactory, few_operations: None) -> Path:
    folder = tmp_path_factory.getbasetemp() / "steps of llama"
    return folder / "checkpoint" if folder.exists() else checkpoint(folder)


def started(path: Path) -> tuple[Steps, Recorder, list[int]]:
    """A run that can be followed, and its last tokens."""
    recorder = Recorder()
    run = Steps(path, recorder)
    found = run.tokens(ALL, 12, Choice())
    assert run.cache.ended is not None
    return run, recorder, found[-1]


@interpreted
@pytest.mark.parametrize("most", [3, 9])
def test_the_host_does_as_much_for_many_steps_as_for_one(most: int, llama: Path) -> None:
    """Two launches a step, and a few operations before and after all of them."""
    run, recorder, last = started(llama)
    step, before = run.next_pass(ALL, torch.tensor(last)), recorder.launches
    with Host() as host:
        found = run.run.decoder.follow_with_tokens(step, Choice(), most)
    assert len(found) == most
    assert recorder.launches - before == 2 * most
    assert host.operations == {
        "aten.copy_.default": 1,  # tokens
        "aten.zero_.default": 1,
        "aten.add_.Tensor": 2,  # positions
    }


@interpreted
def test_steps_end_with_a_token_that_ends_an_answer(llama: Path) -> None:
    """Those that were launched behind it leave nothing."""
    wanted = Steps(llama).tokens(ALL, 40)
    ends = {tokens[1] for tokens in wanted[20:40:9]}
    run = Steps(llama, Recorder())
    assert run.tokens(ALL, 40, Choice(ends=tuple(ends))) == wanted
    begins = [0, *torch.tensor([max(1, n) for n in run.at_once]).cumsum(0).tolist()]
    last = {i + 1 for i, tokens in enumerate(wanted) if ends & {*tokens}}
    assert last <= set(begins)
    assert any(0 < n < 8 for n in run.at_once)


@interpreted
def test_steps_end_where_logits_are_not_finite(llama: Path) -> None:
    run, _, last = started(llama)
    run.cache.rings.v[0][1] = torch.nan
    step = run.next_pass(ALL, torch.tensor(last))
    found = run.run.decoder.follow_with_tokens(step, Choice(), 3)
    assert len(found) == 1
    assert [token < 0 for token in found[0]] == [False, True, False, False]


@interpreted
def test_steps_one_by_one_are_done_without_a_unit(llama: Path) -> None:
    """Their logits are those of ordinary ones: so tokens are drawn, which no recording does."""
    run, _, last = started(llama)
    plain, decoder = Steps(llama), run.run.decoder
    plain.tokens(ALL, 12)
    for _ in range(4):
        step = run.next_pass(ALL, torch.tensor(last))
        assert decoder.follow_with_tokens(step, Choice([Shape()] * SLOTS), 3) == []
        logits = decoder.follow(step)
        assert logits is not None
        wanted = plain.run.forward(plain.next_pass(ALL, torch.tensor(last)))
        assert torch.equal(logits, wanted)
        last = likeliest(logits)


@interpreted
def test_steps_that_cannot_be_taken_back_are_done_one_by_one(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceCachePass, "takes_back", False)
    run = Steps(llama, Recorder())
    run.tokens(ALL, 30, Choice())
    assert set(run.at_once) == {0, 1}


@interpreted
def test_steps_that_are_interrupted_were_not_done(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, last = started(llama)
    before, passes = list(run.cache.lengths), run.cache.ended

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(passes, "advance", interrupt)
        step = run.next_pass(ALL, torch.tensor(last))
        with pytest.raises(KeyboardInterrupt):
            run.run.decoder.follow_with_tokens(step, Choice(), 4)
    assert (run.cache.lengths, run.cache.ended) == (before, None)
    plain = Steps(llama)
    plain.tokens(ALL, 12)
    assert run.tokens(ALL, 4, first=last) == plain.tokens(ALL, 4, first=last)


@interpreted
def test_steps_go_on_where_what_is_between_them_cannot_be_recorded(llama: Path) -> None:
    class Refusing(Recorder):
        def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
            if isinstance(getattr(work, "__self__", None), GraphSteps):
                raise RuntimeError("not permitted")
            return super().__call__(work)

    run = Steps(llama, Refusing())
    with pytest.warns(RuntimeWarning, match="not permitted"):
        found = run.tokens(ALL, 30, Choice())
    assert found == Steps(llama).tokens(ALL, 30)
    assert run.replays is not None
    assert run.replays.failed == 1
    assert run.cache.ended is None or run.at_once[-1] == 0


@interpreted
def test_the_kernels_of_a_gpu_read_what_is_counted(tmp_path: Path, few_programs: None) -> None:
    """They are interpreted, of a sequence that packs a block in the fourth step, one that waits."""
    path = checkpoint(tmp_path)
    plain, run = Steps(path), Steps(path, Recorder())
    for one in (plain, run):
        one.cache.lengths[0] = 76
    assert run.tokens((0,), 8, Choice()) == plain.tokens((0,), 8)
    assert run.at_once == [0, 0, 1, 0, 0, 0, 2]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["llama", "opt", "gemma2", "qwen3-next-head64", "kimi-linear", "ling3"]
)
def test_greedy_tokens_on_a_gpu_do_not_depend_on_how_many_steps_are_done_at_once(
    family: str, tmp_path: Path
) -> None:
    """With prompts of which blocks are completed at other times, and tokens that end answers."""
    prompts = torch.arange(3, 3 + 3 * 20).remainder(29).add(3).split(20)

    def greedy(ends: Sequence[int] | None) -> tuple[list[list[int]], list[int]]:
        cache = runtime.new_cache(3)
        ragged = Ragged.of([20, 7, 13], [0] * 3)
        rows = torch.cat(
            [one[: span.count] for one, span in zip(prompts, ragged.spans, strict=True)]
        )
        logits = runtime.forward(ForwardPass(rows, ragged, cache, ragged.last_rows))
        found, at_once = [likeliest(logits)], list[int]()
        while len(found) < 150:
            ragged = Ragged.of([1] * 3, cache.lengths)
            run = ForwardPass(torch.tensor(found[-1]), ragged, cache, ragged.last_rows)
            more = list[list[int]]()
            if ends is not None:
                more = runtime.tokens(run, Choice(ends=tuple(ends)), 40)
                at_once.append(len(more))
            else:
                cache.ended = None
            found += more or [likeliest(runtime.forward(run))]
        return found[:150], at_once

    with Runtime(checkpoint(tmp_path, family), kv=KV8, device="cuda") as runtime:
        assert runtime.new_cache(1).ended is None
        wanted, _ = greedy(None)
        for ends in ((), {wanted[100][1], wanted[130][0]}):
            found, at_once = greedy(tuple(ends))
            assert found == wanted
            assert sum(at_once) > 30
        replays: Any = runtime.decoder.replays  # type: ignore[union-attr]
        assert not replays.failed
