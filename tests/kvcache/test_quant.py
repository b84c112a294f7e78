"""Bits of a packed KV cache, for all layers and for some."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from qoff.errors import ArgumentError, OpError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import KVQuant
from qoff.kvcache.quant import KVBits
from qoff.models.runtime import Runtime
from qoff.plan.losses import assumed_forms, packable
from tests.tiny_models import tiny_checkpoint


@pytest.mark.parametrize(
    ("bits", "wanted"),
    [
        (4, KVQuant()),
        ((8, 4), KVQuant(8, 4)),
        ("8", KVQuant(8, 8)),
        (" 8 , 4 ", KVQuant(8, 4)),
        ("4,2", KVQuant(4, 2)),
        ("4/0-1:8,4/3:8", KVQuant(layers={0: (8, 4), 1: (8, 4), 3: (8, 8)})),
        ("8/ 2 : 4", KVQuant(8, 8, layers={2: (4, 4)})),
    ],
)
def test_numbers_pairs_and_text_say_the_same(bits: KVBits, wanted: KVQuant) -> None:
    assert KVQuant.of(bits) == wanted
    assert KVQuant.of(bits, 32).window == 32
    assert hash(KVQuant.of(bits)) == hash(wanted)


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ("", "written like 4, or 8,4"),
        ("eight", "written like"),
        ("4,4,4", "written like"),
        ("-4", "written like"),
        ("4/0", "written like"),
        ("4/x:8", "written like"),
        ("4/0-1:", "written like"),
        ("4/3-1:8", "3-1 go backwards or come again"),
        ("4/0-1:8/1:4", "layers 1 go backwards or come again"),
        ("5", "2, 3, 4 or 8 bits, not 5 and 5"),
        ("4/1:6", "2, 3, 4 or 8 bits, not 6 and 6"),
        ((16, 4), "2, 3, 4 or 8 bits, not 16 and 4"),
        ((8, 4, 4), "not \\(8, 4, 4\\)"),
        ([8, 4], "not \\[8, 4\\]"),
    ],
)
def test_other_bits_are_refused(bits: KVBits, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        KVQuant.of(bits)


def test_negative_layers_are_refused() -> None:
    with pytest.raises(ArgumentError, match="no layer -1"):
        KVQuant(layers={-1: (8, 8)})


def heads(head_dim: int) -> HeadShape:
    return HeadShape(2, 1, head_dim, 1.0)


def test_every_layer_has_its_form() -> None:
    kv = KVQuant.of("4/1-2:8,4/4:16")
    assert [kv.bits(layer) for layer in range(4)] == [(4, 4), (8, 4), (8, 4), (4, 4)]
    assert kv.form(heads(64), 4) is None
    assert kv.forms([heads(64)] * 5)[3:] == [KVFormat(64), None]
    with pytest.raises(ArgumentError, match="layer 4 has 16 bits; here every layer"):
        kv.packed_forms([heads(64)] * 5)
    with pytest.raises(ArgumentError, match="for layer 4, but the model's 4 layers"):
        kv.forms([heads(64)] * 4)
    forms = KVQuant.of("4/1:8,4").forms([heads(64), heads(128), heads(64)])
    assert forms == [KVFormat(64), KVFormat(128, 8, 4), KVFormat(64)]
    with pytest.raises(OpError, match="heads of 16 channels"):
        KVQuant().forms([heads(16)])


def test_latent_values_have_the_bits_of_the_keys() -> None:
    latent = HeadShape(2, 1, 576, 1.0, latent=512)
    assert KVQuant(4, 4).form(latent, 0) == KVFormat(576, latent=512)
    with pytest.raises(OpError, match="give both the same bits, not 8 and 4"):
        KVQuant(8, 4).form(latent, 0)
    forms = assumed_forms(converted=True)
    assert {(form.kv.k_bits, form.kv.v_bits) for form in forms} == {(4, 4), (8, 4)}
    assert [form.kv for form in packable(forms, [latent])] == [KVQuant(4, 4)]
    assert packable(forms, [heads(64)]) == forms


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("bits", ["4", "4/0:16"])
def test_values_are_rotated_where_that_is_wanted(
    bits: str, rotated: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    with closing(Runtime(path)) as runtime:
        kv = replace(KVQuant.of(bits), values_rotated=rotated)
        cache = runtime.decoder.new_cache(1, 0, kv)
        assert cache.begin(Ragged.of([1], [0])).open(1).values_rotated is rotated
