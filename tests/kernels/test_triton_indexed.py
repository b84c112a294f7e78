"""Triton's kernels of an index of keys in the interpreter against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.reference import attention as reference
from qoff.kernels.reference.index import index_scores
from tests.kernels.attention_operands import random_cache
from tests.tolerances import assert_close
from tests.triton_module import triton_module

triton_ops = triton_module("ops")
choose = triton_module("indexed.choose")
select = triton_module("indexed.select")
attend = triton_module("indexed.attend")
bound = triton_module("launch.bound")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)
INDEX = IndexShape(heads=16, dim=64, rope_dim=32, top=40)
FORM = KVFormat(64, 8, 8, latent=32)
SIZES = [(2, 5), (0, 30), (0, 0), (1, 64)]  # blocks and recent tokens of each sequence
PREFILL = [15, 20, 0, 1]


def random_lists(cache: DeviceLayerCache, top: int) -> Tensor:
    """Tokens that the rows of a pass may attend to, as an index lists them."""
    chosen = torch.full((len(cache.step.positions), top), 2**30, dtype=torch.int32)
    for row, position in zip(chosen, cache.step.positions.tolist(), strict=True):
        count = min(position + 1, top)
        row[:count] = torch.randperm(position + 1)[:count].sort().values
    return chosen


@pytest.mark.parametrize("chunk", [64, 1024])
def test_of_equal_scores_the_first_are_listed(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_CHUNK", chunk)
    top, rows, most = 40, 7, 320
    for values in (3, 10**6):
        scores = (torch.randint(-values, values, (rows, most)) / 7).float()
        scores[scores == 0] *= torch.randint(0, 2, (int((scores == 0).sum()),)) * 2 - 1.0  # -0, 0
        scores[3] = 0.5
        positions = torch.tensor([0, 39, 40, 200, 319, 41, 38, 300, 50])
        order = torch.tensor([3, 8, 0, 5, 1, 7, 2, 6, 4])
        chosen = torch.full((9, top), -1, dtype=torch.int32)
        select.index_select(scores, positions, order, range(2, 9), chosen)
        for row, own in enumerate(scores, 2):
            count = int(positions[row]) + 1
            best = own[:count].sort(descending=True, stable=True).indices[:top].sort().values
            found = chosen[order[row]]
            assert found[: min(count, top)].tolist() == best.tolist()
        assert (chosen[order[:2]] == -1).all()


def assert_best(chosen: Tensor, scores: Tensor, first: int, top: int) -> None:
    """Rows at positions `first` and on list what has the largest scores, but for rounding."""
    for own, listed, position in zip(scores, chosen, range(first, len(scores[0])), strict=True):
        seen = own[: position + 1]
        places = listed[: min(top, len(seen))].long()
        assert places.diff().gt(0).all()
        rest = torch.ones(len(seen), dtype=torch.bool)
        rest[places] = False
        if rest.any():
            assert seen[rest].max() <= seen[places].min() + 2e-3 * seen.std()


@pytest.mark.parametrize(
    ("index", "dtype", "together"),
    [
        (INDEX, torch.float16, 1 << 20),
        (IndexShape(48, 96, 64, 70), torch.bfloat16, 4 * 320 * 21),  # parts of 21 rows
    ],
    ids=str,
)
def test_what_is_chosen_has_the_largest_scores(
    index: IndexShape, dtype: torch.dtype, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_SCORES", together)
    form = KVFormat(index.dim, 8, 8, latent=index.keys.latent)
    for counts in (None, PREFILL):
        cache = random_cache(form, 1, SIZES, dtype, rows=counts)
        rows = len(cache.step.positions)
        qk, weights = torch.randn(rows, index.width).to(dtype), torch.randn(rows, index.heads)
        weights = weights.to(dtype)
        heads = qk.view(rows, -1, index.dim)
        before = replace(cache, recent_k=cache.recent_k.clone())
        chosen = triton_ops.choose(qk, weights, index, cache, None)
        decodes = cache.step.max_rows == 1
        keys = reference.device_keys(heads[:, index.heads :], cache if decodes else before)
        for own, first, found in keys:
            scores = index_scores(
                heads[own, : index.heads].double(), found.double(), weights[own].double()
            )
            assert_best(chosen[own], scores, first, index.top)


def test_rows_are_in_any_order_and_all_is_listed_where_none_is_late() -> None:
    torch.manual_seed(0)
    cache = random_cache(FORM, 1, SIZES, rows=PREFILL)
    rows = len(cache.step.positions)
    qk, weights = torch.randn(rows, INDEX.width).half(), torch.randn(rows, INDEX.heads).half()
    again = replace(cache, recent_k=cache.recent_k.clone())
    expected = triton_ops.choose(qk.clone(), weights, INDEX, cache, None)
    order = torch.randperm(rows)
    again = replace(again, step=replace(again.step, order=order))
    mixed, shares = torch.empty_like(qk), torch.empty_like(weights)
    mixed[order], shares[order] = qk, weights
    found = triton_ops.choose(mixed, shares, INDEX, again, None)[order]
    for own, other, position in zip(found, expected, cache.step.positions, strict=True):
        count = min(int(position) + 1, INDEX.top)
        assert torch.equal(own[:count], other[:count])
    several = replace(INDEX, top=4096)
    assert not choose.chooses(cache, several.top)
    out = torch.full((rows, several.top), 7, dtype=torch.int32)
    assert triton_ops.choose(mixed, shares, several, again, None, out=out).eq(7).all()


@pytest.mark.parametrize(
    ("form", "dtype", "heads", "least"),
    [
        (KVFormat(96, latent=64), torch.float16, 3, 1 << 10),
        (KVFormat(96, 8, 8, latent=64), torch.bfloat16, 20, 32),
        (KVFormat(64, 3, 3, latent=32), torch.float16, 5, 32),
        (KVFormat(576, latent=512), torch.float16, 2, 32),
    ],
    ids=str,
)
def test_attention_is_to_what_was_chosen(
    form: KVFormat, dtype: torch.dtype, heads: int, least: int
) -> None:
    shape = HeadShape(heads, 1, form.head_dim, 0.1, latent=form.latent)
    config = attend.ChosenConfig(16, num_warps=1, keys=32, least=least)
    for counts in (None, PREFILL):
        cache = random_cache(form, 1, SIZES, dtype, rows=counts)
        both = torch.randn(len(cache.step.positions), heads + 1, form.head_dim).to(dtype)
        q, k = both.split([heads, 1], 1)
        lists = random_lists(cache, 72)
        found = attend.chosen_attention(q, k, cache, shape, lists, config)
        expected = reference.chosen_attention(q.double(), k, cache, shape, lists)
        assert_close(found, expected, dtype=dtype)
        order = torch.randperm(len(q))
        mixed = torch.empty_like(lists)
        mixed[order] = lists
        ordered = replace(cache, step=replace(cache.step, order=order))
        assert torch.equal(attend.chosen_attention(q, k, ordered, shape, mixed, config), found)


def test_lists_are_cut_to_fill_the_processors() -> None:
    config = attend.ChosenConfig(32, num_warps=8)
    assert attend.cut(4, 2048, 132, config) == (16, 128)
    assert attend.cut(16, 2048, 132, config) == (8, 256)
    assert attend.cut(60, 2048, 132, config) == (2, 1024)
    assert attend.cut(600, 2048, 132, config) == (1, 2048)
    assert attend.cut(4, 50, 132, config) == (1, 128)


class Allocated(TorchDispatchMode):
    """Bytes of all tensors that torch allocates within."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}  # alive, so that no address repeats

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if type(x) is Tensor}
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if type(x) is Tensor and x.untyped_storage().data_ptr() not in given:
                self._storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return found


@pytest.mark.parametrize("together", [1 << 20, 5 * 4 * 256])
def test_what_is_allocated_was_counted(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_SCORES", together)
    monkeypatch.setattr(bound.BoundKernel, "__call__", lambda *_: None)
    for name in ("turn", "keep_latents"):  # which allocate nothing
        monkeypatch.setattr(choose, name, lambda *_, **__: None)
    shape = HeadShape(3, 1, 96, 0.1, latent=64)
    for counts in (None, PREFILL):
        cache = random_cache(FORM, 1, SIZES, rows=counts)
        rows = len(cache.step.positions)
        step = replace(cache.step, order=torch.randperm(rows))
        cache = replace(cache, step=step)
        qk, weights = torch.randn(rows, INDEX.width).half(), torch.randn(rows, INDEX.heads).half()
        out = torch.empty(rows, INDEX.top, dtype=torch.int32)
        with Allocated() as allocated:
            choose.choose(qk, weights, INDEX, cache, None, out)
        longest = choose.most_tokens(step, 64)
        assert 0 < allocated.nbytes <= choose.choose_bytes(rows, longest, INDEX, qk.dtype)
        latents = random_cache(KVFormat(96, latent=64), 1, SIZES, rows=counts)
        q, k = torch.randn(rows, 4, 96).half().split([3, 1], 1)
        with Allocated() as allocated:
            attend.chosen_attention(q, k, latents, shape, out)
        sizes = rows, 3, INDEX.top, latents.form, q.dtype, q.device
        assert 0 < allocated.nbytes <= attend.chosen_attention_bytes(*sizes)


def test_refusals() -> None:
    cache = random_cache(FORM, 1, SIZES, rows=PREFILL)
    rows = len(cache.step.positions)
    qk, weights = torch.randn(rows, INDEX.width).half(), torch.randn(rows, INDEX.heads).half()
    with pytest.raises(OpError, match="qk is"):
        triton_ops.choose(qk[:, 1:], weights, INDEX, cache, None)
    out = torch.empty(rows, INDEX.top)
    with pytest.raises(OpError, match="chosen is"):
        triton_ops.choose(qk, weights, INDEX, cache, None, out=out)
    other = random_cache(KVFormat(64, 8, 8), 1, SIZES, rows=PREFILL)
    with pytest.raises(OpError, match="does not fit"):
        triton_ops.choose(qk, weights, IndexShape(16, 64, 32, 8), other, None)
