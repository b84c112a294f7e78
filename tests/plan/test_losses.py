"""Losses that a sweep has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qoff.errors import FormatError
from qoff.kvcache import KVQuant
from qoff.plan.forms import WeightForm, stored_bits
from qoff.plan.losses import Form, assumed_forms, measured_forms, mixtures
from qoff.plan.native_sizes import NativeSizes
from qoff.quant import QuantConfig

from .machines import MIXTURE, SMALL


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "3",
        '{"kv": 1}',
        "[1]",
        '[{"kv": "4,4, window 64", "mean_kl": 0.1}]',
        '[{"kv": "4,4, window 64", "mean_kl": 0.1, "weights": 4}]',
        '[{"kv": "5,4, window 64", "mean_kl": 0.1, "weights": "as they are"}]',
        '[{"kv": "4,4, window 64", "mean_kl": NaN, "weights": "as they are"}]',
    ],
)
def test_a_file_without_losses_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(FormatError, match=r"results\.json"):
        measured_forms(tmp_path)


def test_a_folder_without_a_sweep_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as refusal:
        measured_forms(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path}: has no results.json, which qoff eval")


@pytest.mark.parametrize("model", [SMALL, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("bits", [4.55, 5.2, 6.0, 8.4])
def test_a_mixture_takes_as_many_bits_as_it_says(bits: float, model: dict[str, Any]) -> None:
    form = WeightForm(4, 32, "gptq", bits)
    few = NativeSizes.of(model, QuantConfig())
    mixed = NativeSizes.of(model, QuantConfig(weights=form.mixed(few)))
    many = NativeSizes.of(model, QuantConfig(bits=8))
    part = (sum(mixed.layer_bytes) - sum(few.layer_bytes)) / sum(many.layer_bytes) * 8.5 / 4
    largest = 3 / len(few.layer_bytes)  # of a layer
    assert part == pytest.approx((bits - 4.5) / 4, abs=0.4 * largest)
    assert part <= (bits - 4.5) / 4 + 0.01


def test_mixtures_keep_the_bound_with_few_bits() -> None:
    forms = assumed_forms(False)
    for most in (0.02, 0.04, 0.07):
        for one in mixtures(forms, most):
            assert one.weights is not None
            assert one.weights.target_bits is not None
            assert 0.95 * most - 0.002 <= one.loss <= most
    least = {form.weights.target_bits for form in mixtures(forms, 0.04) if form.weights}
    assert len(least) == 2  # the cache of more bits leaves more to the weights
    assert not mixtures(forms, 1.0)
    assert not mixtures(forms, 0.001)


def test_a_mixture_is_of_groups_that_were_measured_in_8_bits() -> None:
    low, high = 0.1, 0.001
    most = low + 41 / 80 * (high - low) + 1e-9  # that 41 steps of 80 just keep
    measured = {(4, 64, "gptq"): 0.09, (4, 256, "gptq"): low, (8, 256, "rtn"): high}
    forms = [Form(WeightForm(*form), KVQuant(), loss) for form, loss in measured.items()]
    (one,) = mixtures(forms, most)
    assert one.weights is not None
    assert one.weights.target_bits is not None
    assert one.weights.group_size == 256
    part = (one.weights.target_bits - stored_bits(4, 256)) / 4
    assert low + part * (high - low) <= most


def test_experts_of_a_layer_are_alike_in_a_mixture() -> None:
    found = WeightForm(4, 32, "gptq", 6.0).mixed(NativeSizes.of(MIXTURE, QuantConfig()))
    of_experts = [pattern for pattern in found if ".experts." in pattern]
    assert of_experts
    assert all(".experts.*." in pattern for pattern in of_experts)
