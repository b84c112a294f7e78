"""`qoff.QoffCache`: what it remembers after each of its moves is what was read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import qoff
from qoff.errors import ArgumentError, OpError
from qoff.kvcache import KVQuant, PackedCache, PlainCache
from qoff.kvcache.quant import KVBits
from tests.tiny_families import PAD
from tests.tiny_models import tiny_checkpoint
from tests.tolerances import DECODER_LOGITS, assert_close

WINDOW = 16
BITS: list[KVBits | None] = [None, 8, "4/1:8"]
LENGTHS = (100, 41, 90)
ROUNDED = {None: DECODER_LOGITS, 8: 2e-2, "4/1:8": 0.15}  # tokens of a block that was cut are


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")


@pytest.fixture(scope="module")
def loaded(path: Path) -> Iterator[tuple[Any, Any]]:
    model, tokenizer = qoff.load(path, kv=None)
    with model:
        yield model, tokenizer


def new_cache(model: Any, batch_size: int, bits: KVBits | None) -> qoff.QoffCache:
    kv = None if bits is None else KVQuant.of(bits, WINDOW)
    return qoff.QoffCache(model, batch_size, kv=kv)


def padded(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random ids and mask [B, longest], padded on the left."""
    width = max(lengths)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return torch.randint(3, 120, mask.shape) * mask + PAD * (1 - mask), mask


def read(model: Any, cache: qoff.QoffCache, ids: Tensor, mask: Tensor, *, last: int = 1) -> Tensor:
    """Logits of the last columns; ids are those after the cache's, the mask is of all."""
    return model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=last).logits


MOVES: dict[str, tuple[Callable[[qoff.QoffCache], None], list[int], int]] = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0], 0),
    "select": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0], 0),
    "select-bool": (
        lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
        [0, 2],
        0,
    ),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], 0),
    "crop": (lambda c: c.crop(-7), [0, 1, 2], 7),
    "crop-nothing": (lambda c: c.crop(0), [0, 1, 2], 0),
    "crop-a-block": (lambda c: c.crop(-39), [0, 1, 2], 39),
    "copy": (lambda c: copy.deepcopy(c).reset(), [0, 1, 2], 0),
}


@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize(("move", "rows", "removed"), MOVES.values(), ids=MOVES)
def test_a_moved_cache_is_one_that_read_what_is_left(
    move: Callable[[qoff.QoffCache], None],
    rows: list[int],
    removed: int,
    bits: KVBits | None,
    loaded: tuple[Any, Any],
) -> None:
    model, _ = loaded
    ids, mask = padded(LENGTHS)
    cache = new_cache(model, 3, bits)
    read(model, cache, ids, mask)
    move(cache)
    left = ids.shape[1] - removed
    assert cache.get_seq_length() == left
    assert cache.batch_size == len(rows)
    fresh = new_cache(model, len(rows), bits)
    read(model, fresh, ids[rows, :left], mask[rows, :left])
    assert cache.tokens.lengths == fresh.tokens.lengths
    more = torch.randint(3, 120, (len(rows), 3))
    whole = torch.cat((mask[rows, :left], torch.ones_like(more)), 1)
    found, wanted = (read(model, c, more, whole, last=3) for c in (cache, fresh))
    assert_close(found, wanted, tolerance=ROUNDED[bits])


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_a_reset_cache_is_a_new_one(bits: KVBits | None, loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    cache, fresh = (new_cache(model, 3, bits) for _ in range(2))
    read(model, cache, *padded(LENGTHS))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.tokens.lengths == [0, 0, 0]
    assert not cache.is_initialized
    ids, mask = padded((70, 20, 66))
    assert torch.equal(read(model, cache, ids, mask), read(model, fresh, ids, mask))
    cache.reset()
    assert read(model, cache, *padded((5, 9))).shape[0] == 2  # an empty one takes any batch
    cache.tokens.lengths[0] += 1  # as a pass that was interrupted may leave it
    cache.tokens.lose()
    cache.reset()
    assert cache.tokens.lengths == [0, 0]
    assert read(model, cache, *padded((5, 9))).isfinite().all()


def test_rows_go_back_by_as_many_tokens_as_they_have(loaded: tuple[Any, Any]) -> None:
    """Padding between two turns is no token: it is neither remembered nor forgotten."""
    model, _ = loaded
    first, first_mask = padded((30, 12))
    second, second_mask = padded((3, 8))
    mask = torch.cat((first_mask, second_mask), 1)
    wanted = new_cache(model, 2, None)
    read(model, wanted, first, first_mask)
    for removed, swap in ((8, False), (6, False), (2, True)):
        cache = new_cache(model, 2, None)
        read(model, cache, first, first_mask)
        read(model, cache, second, mask)
        assert cache.tokens.lengths == [33, 20]
        if swap:
            cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-removed)
        kept = second_mask[:, : 8 - removed].sum(1).tolist()
        lengths = [30 + kept[0], 12 + kept[1]]
        assert cache.tokens.lengths == (lengths[::-1] if swap else lengths)
        cache.crop(30 - cache.get_seq_length())
        assert cache.tokens.lengths == ([12, 30] if swap else [30, 12])
    found = read(model, cache, second.flip(0), mask.flip(0), last=1).flip(0)
    assert_close(found, read(model, wanted, second, mask, last=1), tolerance=DECODER_LOGITS)


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_a_row_may_go_back_to_nothing(bits: KVBits | None, loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    ids, mask = padded(LENGTHS)
    cache = new_cache(model, 3, bits)
    read(model, cache, ids, mask)
    cache.crop(-59)
    assert cache.tokens.lengths == [41, 0, 31]
    more = torch.randint(3, 120, (3, 4))
    found = read(model, cache, more, torch.cat((mask[:, :41], torch.ones_like(more)), 1))
    assert_close(found[1:2], model(more[1:2], logits_to_keep=1).logits, tolerance=DECODER_LOGITS)


def test_crop_counts_as_transformers_does(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    ours, theirs = qoff.QoffCache(model), DynamicCache()
    theirs.update(torch.zeros(1, 2, 9, 64), torch.zeros(1, 2, 9, 64), 0)
    model(torch.randint(3, 120, (1, 9)), past_key_values=ours)
    for cache in (ours, theirs):
        cache.crop(-4)
        assert cache.get_seq_length() == 5
        cache.crop(0)
        assert cache.get_seq_length() == 5
    with pytest.raises(ValueError, match="negative"):  # as transformers since 5.20
        ours.crop(3)


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_a_system_prompt_is_read_once(bits: KVBits | None, loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    system = tokenizer("You answer in rhymes, and never at length. " * 3, return_tensors="pt")
    cache = new_cache(model, 1, bits)
    model(system.input_ids, past_key_values=cache)
    prompt = cache.get_seq_length()
    for question in ("Why is the sky blue?", "What is a mile?"):
        ids = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        ids = torch.cat((system.input_ids, ids), 1)
        answer = model.generate(ids, past_key_values=cache, **options)
        assert cache.get_seq_length() == ids.shape[1] + 11  # the last token is never read
        fresh = new_cache(model, 1, bits)
        model(system.input_ids, past_key_values=fresh)
        assert torch.equal(answer, model.generate(ids, past_key_values=fresh, **options))
        if bits is None:
            assert torch.equal(answer, model.generate(ids, **options))
        cache.crop(prompt - cache.get_seq_length())
        assert cache.tokens.lengths == [prompt]


@pytest.mark.parametrize("bits", [None, 8], ids=str)
def test_a_conversation_goes_on_in_its_cache(bits: KVBits | None, loaded: tuple[Any, Any]) -> None:
    """Only the new tokens are read, and the answers are those of one cache read in one go."""
    model, tokenizer = loaded
    cache = new_cache(model, 1, bits)
    text = torch.empty(1, 0, dtype=torch.int64)
    for turn in ("A first question of some length, to fill a block or two.", " And then?"):
        ids = tokenizer(turn, return_tensors="pt", add_special_tokens=False).input_ids
        text = torch.cat((text, ids), 1)
        text = model.generate(
            text, past_key_values=cache, max_new_tokens=40, min_new_tokens=40, do_sample=False
        )
        assert cache.get_seq_length() == text.shape[1] - 1
    logits = model(text[:, -1:], past_key_values=cache).logits
    assert_close(
        logits,
        model(text, logits_to_keep=1).logits,
        tolerance=ROUNDED[bits],
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_an_empty_cache_serves_any_batch(beams: int, loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(["Hello", "a longer prompt"], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    cache = qoff.QoffCache(model)
    found = model.generate(**inputs, past_key_values=cache, **options)
    assert torch.equal(found, model.generate(**inputs, **options))
    assert cache.batch_size == 2 * beams


def test_it_is_packed_as_asked_or_as_the_model(path: Path, loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    assert isinstance(qoff.QoffCache(model).tokens, PlainCache)
    ids = torch.randint(3, 120, (1, 200))
    sizes = {}
    for bits in ("4", "8/0:4", (8, 8)):
        cache = qoff.QoffCache(model, kv=KVQuant.of(bits, 0))
        assert isinstance(cache.tokens, PackedCache)
        model(ids, past_key_values=cache)
        assert cache.tokens.packed == [192]
        sizes[bits] = cache.nbytes
        assert str(cache.nbytes) in repr(cache)
    assert sizes["4"] < sizes["8/0:4"] < sizes[8, 8]
    packed, _ = qoff.load(path, kv="4/1:8")
    with packed:
        assert isinstance(qoff.QoffCache(packed).tokens, PackedCache)
        assert isinstance(qoff.QoffCache(packed, kv=None).tokens, PlainCache)


def test_what_does_not_fit_the_model_is_refused(
    loaded: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, _ = loaded
    other, _ = qoff.load(tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama"))
    ids = torch.tensor([[5, 6]])
    with other, pytest.raises(OpError, match=r"2 layers .* size 64; this one has 4 layers .* 16"):
        other(ids, past_key_values=qoff.QoffCache(model))
    with pytest.raises(OpError, match="not a int"):
        qoff.QoffCache(3)  # type: ignore[arg-type]
    with pytest.raises(OpError, match="at least one sequence"):
        qoff.QoffCache(model, 0)
    with pytest.raises(ArgumentError, match="for layer 7, but the model's 2 layers"):
        qoff.QoffCache(model, kv="4/7:8")
