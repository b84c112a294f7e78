"""Layers for multi-token prediction compute what transformers' do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qoff.checkpoint import Checkpoint
from qoff.kernels.layout.ragged import Ragged
from qoff.models.forward_pass import ForwardPass
from qoff.models.mtp import mtp_checkpoint
from qoff.models.runtime import Runtime
from tests.mtp_models import reference_with_mtp, tiny_with_mtp
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
