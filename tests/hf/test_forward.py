"""`forward`: logits, losses, masks and caches as transformers users know them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import qoff
from qoff.errors import OpError, QoffError
from tests.tolerances import DECODER_LOGITS, assert_close

BATCH, WIDTH = 3, 9
LENGTHS = torch.tensor([4, 9, 1])


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 128, (BATCH, WIDTH))


def mask_of(side: str) -> Tensor:
    column = torch.arange(WIDTH)
    if side == "left":
        return (column >= WIDTH - LENGTHS[:, None]).long()
    return (column < LENGTHS[:, None]).long()


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Logits with the positions that transformers' `generate` would give."""
    if mask is not None:
        options |= {
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :],
        }
    return model(ids, **options).logits


@pytest.mark.parametrize("keep", [0, 1, 4, 20])
@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_logits_of_a_padded_batch(
    side: str, keep: int, ids: Tensor, model: Any, reference: Any
) -> None:
    mask = None if side == "none" else mask_of(side)
    found = logits(model, ids, mask, logits_to_keep=keep)
    wanted = logits(reference, ids, mask, logits_to_keep=keep)
    assert found.shape == wanted.shape == (BATCH, min(keep, WIDTH) if keep else WIDTH, 128)
    real = torch.ones(found.shape[:2]) if mask is None else mask[:, -found.shape[1] :]
    assert_close(found[real.bool()], wanted[real.bool()], tolerance=DECODER_LOGITS)
    if keep != 1:  # which is the last token of each row, wherever the padding is
        assert not found[~real.bool()].any()  # zero at padding


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_goes_on(side: str, ids: Tensor, model: Any, reference: Any) -> None:
    """New columns after a padded batch, on either side, see the real tokens alone."""
    mask, more = mask_of(side), torch.randint(3, 128, (BATCH, 2))
    first = model(ids, attention_mask=mask)
    longer = torch.cat([mask, torch.ones(BATCH, 2, dtype=torch.int64)], 1)
    found = model(more, attention_mask=longer, past_key_values=first.past_key_values).logits
    for row in range(BATCH):
        whole = torch.cat([ids[row][mask[row].bool()], more[row]])[None]
        assert_close(found[row], logits(reference, whole)[0, -2:], tolerance=DECODER_LOGITS)


@torch.no_grad()
def test_the_loss_is_that_of_transformers(ids: Tensor, model: Any, reference: Any) -> None:
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    found, wanted = model(ids, labels=labels).loss, reference(ids, labels=labels).loss
    assert float(found) == pytest.approx(float(wanted), rel=1e-3)
    padded = ids.masked_fill(mask_of("right") == 0, -100)
    found, wanted = (
        m(ids, attention_mask=mask_of("right"), labels=padded).loss for m in (model, reference)
    )
    assert float(found) == pytest.approx(float(wanted), rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("count", [7, torch.tensor(50)], ids=["number", "tensor"])
def test_the_loss_of_a_part_of_a_batch(count: Any, ids: Tensor, model: Any, reference: Any) -> None:
    options = {"labels": ids, "num_items_in_batch": count}
    found, wanted = model(ids, **options).loss, reference(ids, **options).loss
    assert float(found) == pytest.approx(float(wanted), rel=1e-3)


def test_tuples_and_caches_on_request(ids: Tensor, model: Any) -> None:
    first, cache = model(ids, return_dict=False)
    assert cache.get_seq_length() == WIDTH
    assert model(ids, use_cache=False).past_key_values is None
    assert torch.equal(first, model(ids).logits)


MASKS = {
    "hole": torch.tensor([[1, 0, 1], [1, 1, 1]]),
    "empty-row": torch.tensor([[0, 0, 0], [1, 1, 1]]),
    "narrow": torch.ones(2, 2),
    "wide": torch.ones(2, 4),
    "other-batch": torch.ones(1, 3),
    "four-dimensional": torch.ones(2, 1, 3, 3),
    "flat": torch.ones(3),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_that_make_no_sense_are_refused(mask: Tensor, model: Any) -> None:
    with pytest.raises(OpError, match="attention_mask"):
        model(torch.full((2, 3), 5), attention_mask=mask)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 1), torch.ones(2, 5), torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])],
    ids=["new-only", "too-long", "other-past"],
)
def test_masks_that_do_not_fit_the_cache_are_refused(mask: Tensor, model: Any) -> None:
    cache = model(torch.full((2, 3), 5)).past_key_values
    new = torch.full((2, 1), 6)
    with pytest.raises(OpError, match="attention_mask must"):
        model(new, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 3
    model(new, attention_mask=torch.ones(2, 4), past_key_values=cache)


def test_a_single_padded_column_is_refused(model: Any) -> None:
    with pytest.raises(OpError, match="attention_mask"):
        model(torch.full((2, 1), 5), attention_mask=torch.tensor([[0], [1]]))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "embeds": ({"inputs_embeds": torch.ones(1, 3, 64)}, "does not support inputs_embeds"),
    "attentions": ({"output_attentions": True}, "does not support output_attentions"),
    "hidden": ({"output_hidden_states": True}, "does not support output_hidden_states"),
    "positions": ({"position_ids": torch.tensor([[5, 6, 7]])}, "position_ids must count"),
    "columns": ({"logits_to_keep": torch.tensor([0, 2])}, "logits_to_keep must be how many"),
    "negative": ({"logits_to_keep": -1}, "logits_to_keep must be how many"),
    "cache": ({"past_key_values": DynamicCache()}, "must come from a qoff model .*DynamicCache"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused(options: Any, message: str, model: Any) -> None:
    with pytest.raises(OpError, match=message):
        model(torch.tensor([[5, 6, 7]]), **options)


def test_ids_that_are_no_batch_are_refused(model: Any) -> None:
    for wrong, message in (
        (None, "not None"),
        (torch.tensor([1, 2]), "not torch.int64 [2]"),
        (torch.ones(1, 3), "not torch.float32 [1, 3]"),
        (torch.empty(1, 0, dtype=torch.int64), "a token in each row"),
        (torch.tensor([[500]]), "tokens are 0 to 127"),
    ):
        with pytest.raises(OpError, match=re.escape(message)):
            model(wrong)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_the_cache_goes_by_the_names_of_all_versions(name: str, ids: Tensor, model: Any) -> None:
    """Of transformers from 5.24 on, and of those before."""
    cache, more = qoff.QoffCache(model), {"max_new_tokens": 2, "do_sample": False}
    model(ids[:1, :-1], **{name: cache})
    found = model.generate(ids[:1], **{name: cache}, **more, pad_token_id=0)
    assert torch.equal(found, model.generate(ids[:1], **more, pad_token_id=0))
    assert cache.get_seq_length() == WIDTH + 1
    with pytest.raises(OpError, match="cache and past_key_values are the same"):
        model(ids[:1], cache=cache, past_key_values=cache)


def test_a_cache_of_another_batch_is_refused(ids: Tensor, model: Any) -> None:
    cache = model(ids).past_key_values
    with pytest.raises(OpError, match="the cache holds 3 sequences, the batch 2"):
        model(ids[:2], past_key_values=cache)


def test_generate_refuses_a_cache_of_transformers(ids: Tensor, model: Any) -> None:
    with pytest.raises(OpError, match="must come from a qoff model"):
        model.generate(ids, past_key_values=DynamicCache(), max_new_tokens=2, pad_token_id=0)


def test_cache_moves(ids: Tensor, model: Any) -> None:
    """Selecting, repeating and cropping sequences leaves the others' logits as they were."""
    new = torch.randint(3, 128, (BATCH, 1))
    wanted = model(torch.cat([ids, new], 1)).logits[:, -1]
    picked = torch.tensor([2, 0])
    for move, rows in (
        (lambda c: c.batch_select_indices(picked), picked),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), torch.tensor([0, 2])),
        (lambda c: c.batch_repeat_interleave(2), torch.arange(3).repeat_interleave(2)),
        (lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), torch.tensor([1, 1, 0])),
    ):
        cache = model(ids).past_key_values
        move(cache)
        found = model(new[rows], past_key_values=cache).logits[:, -1]
        assert_close(found, wanted[rows], tolerance=DECODER_LOGITS)
    cache = model(torch.cat([ids, ids], 1)).past_key_values
    cache.crop(-WIDTH)
    assert cache.get_seq_length() == WIDTH
    assert_close(model(new, past_key_values=cache).logits[:, -1], wanted, tolerance=DECODER_LOGITS)
    cache.reset()
    assert_close(
        model(ids, past_key_values=cache).logits, model(ids).logits, tolerance=DECODER_LOGITS
    )
    with pytest.raises(ValueError, match="negative"):
        cache.crop(5)


def test_saving_is_refused_with_the_reason(model: Any, tmp_path: Any) -> None:
    with pytest.raises(QoffError, match="nothing to save"):
        model.save_pretrained(tmp_path)
