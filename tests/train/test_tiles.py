"""Linear layers in tiles of rows learn as whole ones do, in a device that is too small for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qoff import train
from qoff.errors import ArgumentError, BudgetError, TrainingError
from qoff.train import placement
from qoff.train.cuts import cut
from qoff.train.homes import Homes
from qoff.train.tiled import TiledLinear, loss_of_tiles
from qoff.train.tiles import TileHomes, TileMemory, Tiles

from .test_training import (
    EPS,
    LOSSES,
    LR,
    PLACES,
    assert_same_weights,
    batches_of,
    model_of,
    offloaded,
    torch_step,
)

TILE = 7000  # bytes: of matrices whose rows it does not divide


def tiled(
    place: str,
    folder: Path,
    patch: pytest.MonkeyPatch,
    norm: float | None = None,
    part: str = "layers",
    name: str = "llama",
    of: Callable[..., Any] = model_of,
    options: Mapping[str, Any] = MappingProxyType({}),
    **model: Any,
) -> train.Training:
    """Training in tiles, as the device has no room for a matrix."""
    options = {"optimizer": train.AdamW(lr=LR, eps=EPS), "max_norm": norm, **options}
    patch.setattr(placement, "TILES", (TILE,))
    patch.setattr(placement, "PARTS", (part,))
    whole = offloaded(of(name, **model), place, folder, **options).placement
    assert not whole.host["weights in tiles"] + whole.disk["weights in tiles"]
    room = sum(whole.device.values()) - 1
    made = offloaded(of(name, **model), place, folder, device_memory=room, **options)
    assert made.placement.host["weights in tiles"] + made.placement.disk["weights in tiles"]
    kept = made.placement.device["weights outside of layers"]
    assert (kept < whole.device["weights outside of layers"]) == (part != "layers")
    return made


@pytest.mark.parametrize(
    ("place", "norm", "part", "name"),
    [
        (PLACES[2], None, "layers", "llama"),
        (PLACES[2], 0.5, "layers", "llama"),
        (PLACES[0], None, "layers", "llama"),
        (PLACES[2], 0.5, "outside", "llama"),
        (PLACES[2], None, "all", "tied"),
        (PLACES[0], None, "outside", "tied"),
        (PLACES[2], None, "outside", "gpt2"),
    ],
)
def test_steps_are_those_of_torch(
    place: str,
    norm: float | None,
    part: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: dict[str, Any] = {}
    if name == "gpt2":
        model = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    training = tiled(place, tmp_path, monkeypatch, norm, part, name, **model)
    reference = model_of(name, **model)
    assert (training.placement.device["tiles of weights"] > 0) == (place == PLACES[2])
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, eps=EPS)
    for step in range(4):
        wanted = torch_step(reference, optimizer, batches_of(step), norm)
        assert training.step(batches_of(step)) == pytest.approx(wanted, abs=LOSSES)
    with torch.no_grad():
        wanted = float(reference.eval()(**batches_of(0)[0]).loss)
    assert training.evaluate(batches_of(0)[:1]) == pytest.approx(wanted, abs=LOSSES)
    assert_same_weights(training.state_dict(), reference)
    training.save_model(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_weights(dict(saved.named_parameters()), reference)


@pytest.mark.parametrize("part", ["layers", "all"])
def test_in_bfloat16_a_resumed_run_is_the_same_bit_for_bit(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half: dict[str, Any] = {"dtype": torch.bfloat16, "part": part}
    whole, first, second = (tiled(PLACES[2], tmp_path, monkeypatch, **half) for _ in range(3))
    wanted = [whole.step(batches_of(i)) for i in range(4)]
    found = [first.step(batches_of(i)) for i in range(2)]
    first.save(tmp_path / "run")
    second.resume(tmp_path / "run")
    assert found + [second.step(batches_of(i)) for i in range(2, 4)] == wanted
    ours, theirs = second.state_dict(), whole.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    in_memory = offloaded(model_of("llama", torch.bfloat16), PLACES[0], tmp_path)
    assert found[0] == pytest.approx(in_memory.step(batches_of(0)), abs=0.02)
    with pytest.raises(ArgumentError, match="another run: its"):
        in_memory.resume(tmp_path / "run")


def test_what_cannot_be_cut_is_refused_with_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "TILES", (TILE,))
    with pytest.raises(BudgetError, match=r"too few by .*tiles of weights"):
        offloaded(model_of("llama"), PLACES[2], tmp_path, device_memory=1 << 16)


def with_embedding(name: str) -> Any:
    """A model with an embedding in a layer, of what is above zero."""
    model = model_of(name)
    mlp = model.model.layers[1].mlp
    mlp.kinds, own = nn.Embedding(64, 64), mlp.forward
    mlp.forward = lambda x: own(x) + mlp.kinds((x[..., 0] > 0).long())
    return model


def test_an_embedding_in_a_layer_stays_whole_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = tiled(PLACES[2], tmp_path, monkeypatch, of=with_embedding)
    reference, name = with_embedding("llama"), "model.layers.1.mlp.kinds.weight"
    before = training.state_dict()[name]
    assert before.nbytes > TILE
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, eps=EPS)
    for step in range(2):
        wanted = torch_step(reference, optimizer, batches_of(step), None)
        assert training.step(batches_of(step)) == pytest.approx(wanted, abs=LOSSES)
    found = training.state_dict()
    assert_same_weights(found, reference)
    assert (found[name][:2] - before[:2]).abs().max() > LR


def with_doubled_loss(name: str) -> Any:
    model = model_of(name)
    own = model.forward

    def forward(**given: Any) -> Any:
        found = own(**given)
        if found.loss is not None:
            found.loss = 2 * found.loss
        return found

    model.forward = forward
    return model


def test_a_head_whose_loss_is_computed_again_has_its_gradient_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the loss is another than the head's, which has added to the gradients of its tiles."""
    training = tiled(PLACES[2], tmp_path, monkeypatch, 1e9, "outside", of=with_doubled_loss)
    reference = with_doubled_loss("llama")
    reference(**batches_of(0)[0], use_cache=False).loss.backward()
    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    training.step(batches_of(0)[:1])
    assert training._engine.parts.head.fused is False
    assert training.grad_norm == pytest.approx(float(wanted), rel=1e-5)


def test_ids_beyond_the_vocabulary_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = tiled(PLACES[0], tmp_path, monkeypatch, part="outside")
    with pytest.raises(IndexError, match="not all from 0 to 127"):
        training.model(torch.full((1, 4), 128))


def test_a_loss_is_that_of_torch_however_large_its_logits() -> None:
    """The largest may be in any tile; with a bias, which learns."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50)
    homes = Homes(0, 1 << 20, 0, None)
    weight: Any = head.weight
    _, parts = cut(0, {"weight": weight}, {id(head.weight): (head,)}, 7 * 8 * 4)
    places = [
        TileHomes(
            homes.home("weights", part.unit.nbytes, True),
            homes.home("gradients", 4 * part.unit.count, True),
            torch.float32,
        )
        for part in parts
    ]
    tiles = Tiles(homes, homes, parts, places, TileMemory(), torch.device("cpu"))
    x, wanted = 300 * torch.randn(9, 8), torch.randint(0, 50, (9,))
    x.requires_grad_()
    loss = torch.nn.functional.cross_entropy(head(x), wanted, reduction="sum") / 4
    loss.backward()
    of_weight, of_bias = head.weight.grad, torch.zeros(50)
    assert of_weight is not None
    for j in range(len(parts)):
        tiles.fill(j)
    linear = TiledLinear(head, tiles, range(len(parts)))
    memory = torch.empty(9 * linear.most_rows)
    given = linear, x.detach(), wanted, 0.25
    with torch.no_grad():
        found, of_x = loss_of_tiles(*given, True, memory, lambda _: of_bias)
    near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(found, loss.detach(), **near)
    torch.testing.assert_close(of_x, x.grad, **near)
    torch.testing.assert_close(of_bias, head.bias.grad, **near)
    for j, part in enumerate(parts):
        with tiles.gradient(j) as (total, begun):
            assert begun
            torch.testing.assert_close(total, of_weight[part.rows], **near)
    homes.close()


def test_a_step_that_is_refused_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = tiled(PLACES[2], tmp_path, monkeypatch)
    training.step(batches_of(0))
    before = training.state_dict()
    inputs = training.model.get_input_embeddings()
    handle = inputs.register_forward_hook(lambda *x: x[2] * float("nan"))
    with pytest.raises(TrainingError, match="loss is nan"):
        training.step(batches_of(1))
    handle.remove()
    after = training.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_a_loop_that_breaks_leaves_no_read_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the error is held, too, whose traceback keeps the loop."""
    waited, begun = list[int](), list[int]()

    class Read:
        def __init__(self, j: int) -> None:
            self.j = j
            begun.append(j)

        def result(self) -> None:
            waited.append(self.j)

        exception = result

    class Broken:
        def t(self) -> None:
            raise RuntimeError("no memory")

    tiles: Any = Tiles.__new__(Tiles)
    tiles.tiles = [SimpleNamespace(rows=slice(j, j + 1)) for j in range(3)]
    for name, found in (("_read", lambda j, at: Read(j)), ("_at", lambda j, at: None),
                        ("_matrix", lambda j, memory: Broken())):  # fmt: skip
        monkeypatch.setattr(tiles, name, found)
    linear = TiledLinear(torch.nn.Linear(4, 3), tiles, [0, 1, 2])
    with pytest.raises(RuntimeError, match="no memory") as held:
        linear.forward(torch.zeros(2, 4))
    assert begun == waited == [0, 1]
    assert held.value is not None
