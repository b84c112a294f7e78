"""Layers for multi-token prediction compute what transformers' do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.verify import verify
from qoff.errors import ChecksumError
from qoff.kernels.layout.ragged import Ragged
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.mtp import mtp_checkpoint
from qoff.models.runtime import Runtime
from tests.mtp_models import reference_with_mtp, save_with_mtp, tiny_with_mtp
from tests.tiny_models import QUANT
from tests.tolerances import DECODER_LOGITS, LINEAR_LOGITS, assert_close

FAMILIES = ("deepseek-v3", "glm4-moe", "mellum", "qwen3-next-head64", "qwen3.5-moe")


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_with_mtp(tmp_path_factory.getbasetemp(), request.param)


def test_a_layer_predicts_as_transformers_does(path: Path) -> None:
    """Hidden states of the model, then logits and hidden states of the layer, in two passes."""
    torch.manual_seed(3)
    tokens = torch.randint(3, 90, (1, 20))
    model, mtp = reference_with_mtp(path)
    with torch.no_grad():
        hidden = model(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, tokens.shape[1])[None]
        expected = mtp.forward_layer(0, hidden, positions, None, input_ids=tokens[:, 1:])
        logits = model.lm_head(expected)
    checkpoint = Checkpoint.open(path)
    layer = mtp_checkpoint(checkpoint)
    assert layer is not None
    with Runtime(checkpoint) as whole, Runtime(layer) as ahead:
        tolerance = LINEAR_LOGITS if whole.spec.recurrent else DECODER_LOGITS
        cache, own = whole.new_cache(1), ahead.new_cache(1)
        for start, stop in ((0, 12), (12, 19)):
            count = stop - start
            ragged, rows = Ragged.of([count], [start]), torch.arange(count)
            run = ForwardPass(tokens[0, start:stop], ragged, cache, rows)
            run.wants_final = True
            whole.forward(run)
            assert run.final is not None
            assert_close(run.final, hidden[0, start:stop], tolerance=tolerance)
            more = ForwardPass(tokens[0, start + 1 : stop + 1], ragged, own, rows)
            more.previous, more.wants_final = run.final, True
            found = ahead.forward(more)
            assert more.final is not None
            assert_close(more.final, expected[0, start:stop], tolerance=tolerance)
            assert_close(found, logits[0, start:stop], tolerance=tolerance)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.3.self_attn.o_proj.weight"), "no tensor"),
        (lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(64, 64)}),
         "has shape"),
    ],
    ids=["missing", "another shape"],
)  # fmt: skip
def test_a_layer_unlike_the_others_is_left_out(
    damage: Callable[[dict[str, Tensor]], object],
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The model is converted as before."""
    save_with_mtp(tmp_path / "model", "glm4-moe")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    path = convert(tmp_path / "model", tmp_path / "checkpoint", quant=QUANT)
    assert Checkpoint.open(path).mtp is None
    assert "multi-token prediction is left out" in caplog.text
    assert message in caplog.text


def test_a_damaged_file_of_the_layer_is_found(tmp_path: Path) -> None:
    path = tiny_with_mtp(tmp_path, "glm4-moe")
    file = path / "model-mtp.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumError, match="model-mtp"):
        verify(path)
