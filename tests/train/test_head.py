"""Head and loss as one give torch's loss and gradients, with the logits of a few tokens."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.loss.loss_utils import LOSS_MAPPING

from qoff import train
from qoff.train import head as work
from qoff.train.head import FusedHead
from qoff.train.passes import TrainingPass
from tests.train.test_training import batch, model_of

WIDTH, VOCABULARY, PIECE = 16, 50, 3  # tokens at once


class Model(nn.Module):
    """A head and the loss that transformers has."""

    loss_function = staticmethod(LOSS_MAPPING["ForCausalLM"])

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden)
        loss: Tensor = self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)
        return loss


class OtherHead(nn.Linear):
    """Not known to be linear."""


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(
    ("kind", "bias", "dtype"),
    [
        (nn.Linear, True, torch.float32),
        (nn.Linear, False, torch.bfloat16),
        (OtherHead, False, torch.float32),
    ],
)
def test_loss_and_gradients_are_those_of_torch(
    kind: type[nn.Linear],
    bias: bool,
    dtype: torch.dtype,
    learns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    for name in ("_LOGITS", "_LEARNING"):
        monkeypatch.setattr(work, name, 4 * PIECE * VOCABULARY)
    model = Model(kind(WIDTH, VOCABULARY, bias=bias, dtype=dtype).requires_grad_(learns))
    hidden = torch.randn(2, 9, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (2, 9))
    labels[0, 2:5] = -100
    wanted = model(hidden, labels) * 0.25
    wanted.backward()
    assert hidden.grad is not None
    of_hidden, hidden.grad = hidden.grad, None
    of_weights = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None

    fused = FusedHead(model)
    memory = torch.empty(fused.logits_bytes(18), dtype=torch.uint8)
    assert len(memory) == (0 if kind is OtherHead else 4 * PIECE * VOCABULARY)
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()}
    fused.begin(memory, lambda p: sums[p])  # type: ignore[index]
    one = TrainingPass(lambda: fused.share_of(model(hidden, labels), 0.25), 0.25)
    loss = one.advance()
    loss.backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"atol": 5e-3}
    rtol = tolerance.get("rtol", 2e-2)
    assert fused.fused
    torch.testing.assert_close(loss, wanted, rtol=rtol, atol=tolerance["atol"])
    torch.testing.assert_close(hidden.grad, of_hidden, rtol=rtol, atol=tolerance["atol"])
    for name, p in model.named_parameters():
        if learns:
            found = p.grad if p.grad is not None else sums[p].to(dtype)
            torch.testing.assert_close(
                found, of_weights[name], rtol=rtol, atol=tolerance["atol"], msg=name
            )
        else:
            assert p.grad is None
            assert not sums[p].any()
    torch.testing.assert_close(model(hidden, labels) * 0.25, wanted)  # outside of a pass, its own


def test_kernels_are_launched_on_the_gpu_that_has_the_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, current = Model(nn.Linear(WIDTH, VOCABULARY)), list[torch.device]()

    def guard(device: torch.device) -> nullcontext[None]:
        current.append(device)
        return nullcontext()

    monkeypatch.setattr(work, "device_guard", guard)
    fused = FusedHead(model)
    fused.begin(torch.empty(fused.logits_bytes(4), dtype=torch.uint8), torch.zeros_like)
    hidden, labels = torch.randn(1, 4, WIDTH), torch.randint(0, VOCABULARY, (1, 4))
    TrainingPass(lambda: fused.share_of(model(hidden, labels), 1.0), 1.0).advance()
    assert current == [hidden.device]


@pytest.mark.parametrize(("name", "fused"), [("llama", True), ("gemma2", False)])
def test_models_that_change_logits_keep_their_own_loss(name: str, fused: bool) -> None:
    changes: dict[str, Any] = {} if fused else {"final_logit_softcapping": 5.0}
    model, reference = model_of(name, **changes), model_of(name, **changes)
    training = train.offload(model, train.SGD(lr=1e-3), tokens=12)
    wanted = float(reference(**batch(0)).loss.detach())
    assert training.step([batch(0)]) == pytest.approx(wanted, abs=1e-5)
    assert training._engine.parts.head.fused is fused
    reference.train()(**batch(0)).loss.backward()
    with torch.no_grad():
        for p in reference.parameters():
            p -= 1e-3 * p.grad
    for key, x in training.state_dict().items():
        torch.testing.assert_close(x, reference.get_parameter(key), rtol=0, atol=1e-6, msg=key)


def doubled(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """A loss of somebody's own."""
    return 2 * functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].ravel())


def test_a_loss_of_its_own_is_what_is_trained() -> None:
    model, reference = model_of("llama"), model_of("llama")
    wanted = 2 * float(reference(**batch(0)).loss.detach())
    model.loss_function = doubled
    training = train.offload(model, train.SGD(lr=0.0), tokens=12)
    assert training._engine.parts.head.fused is False
    assert training.step([batch(0)]) == pytest.approx(wanted, abs=1e-5)
    assert training.evaluate([batch(0)]) == pytest.approx(wanted, abs=1e-5)


def test_other_errors_of_a_first_pass_do_not_give_up_the_fused_head() -> None:
    training = train.offload(model_of("llama"), train.SGD(lr=0.0), tokens=12)
    wrong = batch(0)
    wrong["labels"][0, -1] = 1 << 20
    training._limits = replace(training._limits, vocabulary=1 << 21)  # so that the head finds it
    with pytest.raises(RuntimeError):
        training.step([wrong])
    assert training._engine.parts.head.fused is None
    training.step([batch(0)])
    assert training._engine.parts.head.fused


def test_an_error_of_what_a_model_does_to_logits_gives_it_up() -> None:
    head = nn.Linear(WIDTH, VOCABULARY)
    model = Model(head)
    model.forward = lambda hidden: model.head(hidden) + head.bias  # type: ignore[assignment]
    fused = FusedHead(model)
    fused.begin(torch.empty(fused.logits_bytes(18), dtype=torch.uint8), lambda p: p)
    one = TrainingPass(lambda: model(torch.ones(2, 9, WIDTH)), 1.0)
    with pytest.raises(RuntimeError) as raised:
        one.advance()
    assert fused.give_up(one, raised.value)
    assert fused.fused is False


@pytest.mark.parametrize("kind", [nn.Linear, OtherHead])
def test_evaluation_has_the_logits_of_a_piece_and_adds_no_gradients(
    kind: type[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LOGITS", "_LEARNING"):
        monkeypatch.setattr(work, name, 4 * PIECE * 128)
    model = model_of("llama")
    model.lm_head.__class__ = kind
    training = train.offload(model, train.SGD(lr=0.0), tokens=12, micro_batches=2)
    head, given = training._engine.parts.head, [batch(i) for i in range(3)]
    wanted = training.evaluate(given)  # by the model itself
    training.step([batch(0)])
    assert head.fused
    monkeypatch.setattr(head, "_sum_of", None)
    monkeypatch.setattr(head, "_loss", None)
    assert training.evaluate(given) == pytest.approx(wanted, abs=1e-6)
