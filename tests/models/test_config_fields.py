"""Sizes, counts and types of configs are checked before anything is made of them."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qoff.checkpoint import Checkpoint
from qoff.engine.answers import default_params, end_tokens
from qoff.errors import FormatError, QoffError
from qoff.models.convert.builder import Builder
from qoff.models.convert.unconverted import Unconverted
from qoff.models.families import read_spec
from qoff.models.runtime import Runtime
from qoff.models.sources import open_source
from qoff.quant import QuantConfig
from tests.checkpoint.samples import edit_json
from tests.tiny_families import FAMILIES, TINY
from tests.tiny_models import save_gguf, tiny_checkpoint, tiny_model

HUGE = (0, -1, 1 << 17, 1 << 20, 1 << 32, 1 << 63, 10**400, 1.5, True, "2", [2], math.nan)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")


def refused_at_once(run: Callable[[], object], message: str) -> None:
    start = time.process_time()
    with pytest.raises(QoffError, match=message) as refusal:
        run()
    assert "\n" not in str(refusal.value)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("key", [*COUNTS, *SIZES])
def test_a_number_no_model_has_is_named(key: str, value: Any) -> None:
    if key in SIZES and value in (1 << 17, 1 << 20):
        return
    config = {**TINY, **FAMILIES["llama"], key: value}
    refused_at_once(lambda: read_spec(config), rf"config\.json.*{key}")


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3-moe", "num_experts", 1 << 32),
        ("qwen3-moe", "moe_intermediate_size", 1 << 63),
        ("qwen3-moe", "mlp_only_layers", 5),
        ("llama", "rms_norm_eps", math.nan),
        ("llama", "rope_theta", "10000"),
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": math.inf}),
        ("llama", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": "4"}),
        ("llama", "rope_parameters", []),
        ("llama", "hidden_act", 5),
        ("llama", "attention_bias", "yes"),
        ("llama", "eos_token_id", {"id": 2}),
        ("gpt-neox", "rotary_pct", math.inf),
        ("granite", "embedding_multiplier", "12"),
        ("gemma2", "query_pre_attn_scalar", None),
        ("gemma2", "layer_types", [1, 2, 3]),
    ],
)
def test_fields_of_families(family: str, key: str, value: Any) -> None:
    config = {**TINY, **FAMILIES[family], key: value}
    refused_at_once(lambda: read_spec(config), r"config\.json")


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("hy-v3", "mlp_bias", True, "mlp_bias is True; supported: false"),
        ("ernie4.5-moe", "moe_layer_end_index", "2", "moe_layer_end_index is '2'"),
        ("olmo3", "rope_parameters", ROPE, "supported: one object for each of full_attention and"),
    ],
)
def test_what_is_left_out_is_said(family: str, key: str, value: Any, message: str) -> None:
    config = {**TINY, **FAMILIES[family], "rope_scaling": None, key: value}
    refused_at_once(lambda: read_spec(config), message)


def test_without_an_end_experts_go_to_the_last_layer() -> None:
    config = {**TINY, **FAMILIES["ernie4.5-moe"]}
    assert read_spec({**config, "moe_layer_end_index": None}) == read_spec(config)


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("llama", "num_hidden_layers", 65000, "num_hidden_layers 65000, but there is no tensor"),
        ("qwen3-moe", "num_local_experts", 60000, "60000 experts, but tensor"),
    ],
)
def test_counts_are_compared_with_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    family: str,
    key: str,
    value: int,
    message: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(tmp_path_factory.getbasetemp(), family), model)
    edit_json(model / "config.json", lambda c: c.update({key: value, "layer_types": None}))
    refused_at_once(lambda: Unconverted.of(open_source(model)), message)


@pytest.mark.parametrize("value", [1 << 12, 1 << 20, (1 << 31) - 1, (1 << 32) - 1])
@pytest.mark.parametrize("key", ["block_count", "feed_forward_length", "attention.head_count"])
def test_absurd_sizes_in_gguf(tmp_path: Path, key: str, value: int) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(path)
    content = path.read_bytes()
    name = f"llama.{key}".encode()
    at = content.index(name) + len(name) + 4
    path.write_bytes(content[:at] + value.to_bytes(4, "little") + content[at + 4 :])

    def read() -> None:
        model = Unconverted.of(open_source(path))
        builder = Builder(model.source, QuantConfig(), requantize=False)
        for unit in model.units:
            builder.check(*unit)

    refused_at_once(read, r"m\.gguf|config\.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "asks for"),
        ({"intermediate_size": 1 << 30}, r"gate_up_proj .* asks for"),
        ({"num_key_value_heads": 1}, "asks for"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers 3"),
        ({"vocab_size": 1 << 30}, r"embed_tokens .* asks for"),
        ({"attention_bias": True}, r"bias is not there"),
    ],
)
def test_a_checkpoint_of_another_config_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint(tmp_path_factory.getbasetemp()), copy)
    edit_json(copy / "config.json", lambda c: c.update(change))
    with pytest.raises(FormatError, match=message):
        Runtime(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
        ("eos_token_id", 2.0),
        ("temperature", "0.6"),
        ("temperature", math.nan),
        ("temperature", -1),
        ("top_p", 10**400),
        ("top_k", 1.5),
        ("max_new_tokens", 0),
        ("max_new_tokens", [5]),
        ("do_sample", "yes"),
        ("cache_implementation", 5),
        ("watermarking_config", 5),
    ],
)
def test_generation_configs_name_file_and_field(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, key: str, value: Any
) -> None:
    found = Checkpoint.open(tiny_checkpoint(tmp_path_factory.getbasetemp()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, key: value}))
    checkpoint = Checkpoint(tmp_path, found.config, found.layers, found.outer)

    def read() -> None:
        end_tokens(checkpoint)
        default_params(checkpoint)

    with pytest.raises(FormatError, match=r"generation_config\.json: ") as refusal:
        read()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1, "a": 2}', "[" * 9999, "\udcff"])
def test_generation_configs_that_are_no_objects(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, content: str
) -> None:
    found = Checkpoint.open(tiny_checkpoint(tmp_path_factory.getbasetemp()))
    data = content.encode("utf-8", "surrogateescape")
    (tmp_path / "generation_config.json").write_bytes(data)
    with pytest.raises(FormatError, match=r"generation_config\.json: is not a JSON object"):
        end_tokens(Checkpoint(tmp_path, found.config, found.layers, found.outer))


@pytest.mark.parametrize("file", [5, None, ["a"], {"a": 1}, "", "..", "a/b", "x" * 300, "a\0b"])
def test_an_index_with_other_things_than_files(tmp_path: Path, file: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(FormatError, match=r"index\.json"):
        open_source(tmp_path)
