"""`qoff.load`: checkpoints, models converted on the way, hub ids, and what goes wrong."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

import qoff
from qoff.checkpoint.layout import COMPANIONS
from qoff.errors import (
    ArgumentError,
    BudgetError,
    ClosedError,
    ConversionError,
    FormatError,
    OpError,
    QoffError,
    UnsupportedModelError,
)
from qoff.hf.checkpoints import check_source, find_checkpoint, is_checkpoint
from qoff.hf.hub import download
from qoff.hf.load import open_runtime
from qoff.hf.tokenizer import load_tokenizer
from qoff.quant import QuantConfig
from tests.tiny_models import QUANT, load_budgets, save_gguf

HUB_ID = "someone/tiny-model"
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources of conversions done so far."""
    from qoff.hf import checkpoints as module

    done: list[Path] = []
    original = module.convert

    def counted(source: Path, *args: Any, **kwargs: Any) -> Path:
        done.append(Path(source))
        return original(source, *args, **kwargs)

    monkeypatch.setattr(module, "convert", counted)
    return done


def test_a_directory_is_converted_once(
    source: Path, tmp_path: Path, conversions: list[Path], model: Any
) -> None:
    seen = []
    for _ in range(2):
        converted, tokenizer = qoff.load(
            source,
            quant=QUANT,
            cache_dir=tmp_path / "deep" / "cache",
            progress=lambda done, total: seen.append((done, total)),
        )
        with converted.runtime:
            assert torch.equal(converted(IDS).logits, model(IDS).logits)
        assert tokenizer("ab").input_ids == [69, 70]
    assert conversions == [source]
    assert seen[-1] == (5, 5)
    find_checkpoint(source, quant=QuantConfig(group_size=32), cache_dir=tmp_path / "deep" / "cache")
    assert len(conversions) == 2  # quantized in another way


def test_a_changed_source_is_converted_again(
    source: Path, tmp_path: Path, conversions: list[Path]
) -> None:
    copy, cache = tmp_path / "copy", tmp_path / "cache"
    shutil.copytree(source, copy)
    first = find_checkpoint(copy, quant=QUANT, cache_dir=cache)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    second = find_checkpoint(copy, quant=QUANT, cache_dir=cache)
    assert first != second
    assert len(conversions) == 2
    assert json.loads((second / "config.json").read_text())["rms_norm_eps"] == 1e-3


def test_a_cache_that_cannot_be_written_can_be_moved(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match=r"cannot be written .*QOFF_CACHE or cache_dir"):
        find_checkpoint(source, quant=QUANT, cache_dir=tmp_path / "file")


def test_the_cache_directory_is_an_environment_variable(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path / "here"))
    assert find_checkpoint(source, quant=QUANT).parent == tmp_path / "here"


def test_a_checkpoint_needs_no_home(
    source: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run as a user without a name."""
    for name in ("QOFF_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["of this user"])
    assert find_checkpoint(checkpoint) == checkpoint
    with pytest.raises(ConversionError, match=r"cannot be written .*QOFF_CACHE or cache_dir"):
        find_checkpoint(source, quant=QUANT)


def test_a_checkpoint_is_taken_as_it_is(checkpoint: Path, conversions: list[Path]) -> None:
    assert is_checkpoint(checkpoint)
    assert find_checkpoint(str(checkpoint)) == checkpoint
    assert conversions == []


def test_a_checkpoint_is_not_quantized_again(checkpoint: Path) -> None:
    for load in (qoff.load, qoff.LLM):
        with pytest.raises(ArgumentError, match="quantized already; leave quant out"):
            load(checkpoint, quant=QUANT)


@pytest.mark.parametrize(
    "wrong", [{"context": 0}, {"batch_size": 0}, {"batch_size": None}], ids=str
)
def test_room_for_less_than_a_token_is_refused_before_a_conversion(
    wrong: dict[str, Any], source: Path, conversions: list[Path]
) -> None:
    with pytest.raises(ArgumentError, match="use a whole number from 1"):
        qoff.load(source, **wrong)
    assert conversions == []


def test_only_a_cache_that_cannot_be_packed_is_opened_in_floats(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qoff.hf import load as module

    opened: list[object] = []

    def failing(*_: object, kv: object, **__: object) -> None:
        opened.append(kv)
        raise OpError("something else")

    monkeypatch.setattr(module, "Runtime", failing)
    with pytest.raises(OpError, match="something else"):
        qoff.load(checkpoint)
    assert len(opened) == 1


def test_a_hub_id_is_downloaded_and_converted_once(
    source: Path, tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def snapshot(hub_id: str, *, revision: str, allow_patterns: list[str], **_: Any) -> str:
        asked.append((hub_id, revision, "*.safetensors" in allow_patterns))
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for _ in range(2):
        model, _ = qoff.load(HUB_ID, revision="main", quant=QUANT, cache_dir=tmp_path)
        with model.runtime:
            assert model(IDS).logits.isfinite().all()
    config, weights = (HUB_ID, "main", False), (HUB_ID, "main", True)
    assert asked == [config, weights, config]  # the weights may be deleted after the conversion
    assert conversions == [source]


def test_all_that_a_conversion_reads_is_downloaded_and_nothing_else(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: dict[str, list[str]] = {}

    def snapshot(hub_id: str, **options: Any) -> str:
        patterns.update(options)
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    download(HUB_ID, None)
    allow, ignore = patterns["allow_patterns"], patterns["ignore_patterns"]
    wanted = [*COMPANIONS, "config.json", "model.safetensors", "1_Pooling/config.json"]
    others = ["onnx/model.json", "original/tokenizer.model", "consolidated.safetensors"]
    others += ["2_Dense/model.safetensors", "1_Dense/config.json", "pytorch_model.bin"]
    files = [*wanted, *others]
    found = filter_repo_objects(files, allow_patterns=allow, ignore_patterns=ignore)
    assert list(found) == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mystery"}, "mystery"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'; supported: awq"),
    ],
)
def test_an_unsupported_hub_model_is_refused_before_its_weights_come(
    change: dict[str, Any],
    message: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))

    def snapshot(hub_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        assert allow_patterns == ["config.json"]
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(UnsupportedModelError, match=message):
        qoff.load(HUB_ID)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (HUB_ID, "the network and HF_HUB_OFFLINE"),
        ("/no/such/place", "not a hub id"),
    ],
)
def test_a_name_that_is_nowhere_gives_one_message(name: str, message: str) -> None:
    with pytest.raises(QoffError, match=rf"^{name}: no such file or directory, and.*{message}$"):
        qoff.load(name)


def test_a_hub_that_does_not_answer_gives_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no network\nand no local copy")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(QoffError, match=f"^{HUB_ID}: .*network.*$") as error:
        qoff.load(HUB_ID)
    assert "\n" not in str(error.value)


def test_a_gguf_file_is_converted(tmp_path: Path, conversions: list[Path]) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path)
    for _ in range(2):
        found = find_checkpoint(path, quant=QUANT, cache_dir=tmp_path / "cache")
    assert conversions == [path]
    assert found.name.startswith("model-")
    model, tokenizer = qoff.load(path, quant=QUANT, cache_dir=tmp_path / "cache")
    with model.runtime:
        assert model(IDS).logits.isfinite().all()
        assert tokenizer.decode(tokenizer("the").input_ids, skip_special_tokens=True) == "the"


def without_tokenizer(checkpoint: Path, tmp_path: Path) -> Path:
    path = tmp_path / "mute"
    shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns("tokenizer*", "chat*"))
    return path


def test_a_missing_tokenizer_is_named(checkpoint: Path, tmp_path: Path) -> None:
    path = without_tokenizer(checkpoint, tmp_path)
    for family in ("llama", "gpt2"):  # of the second transformers makes an empty one
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "model_type": family}))
        with pytest.raises(FormatError, match=rf"^{path}: no usable tokenizer") as error:
            load_tokenizer(path)
        assert "\n" not in str(error.value)


def test_a_damaged_tokenizer_is_named(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "garbled"
    shutil.copytree(checkpoint, path)
    for content in ('{"model": 7}', "{", "[]"):
        (path / "tokenizer.json").write_text(content)
        with pytest.raises(FormatError, match=rf"^{path}: no usable tokenizer"):
            qoff.load(path)


def test_a_failed_load_leaves_no_threads(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        assert threading.active_count() > before
        raise FormatError(f"{path}: no")

    before = threading.active_count()
    monkeypatch.setattr("qoff.hf.load.read_generation_config", fail)
    with pytest.raises(FormatError):
        qoff.load(checkpoint)
    assert threading.active_count() == before


def test_free_memory_is_measured_beside_the_tokenizer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qoff.hf import load as module

    order = []
    for name in ("load_tokenizer", "default_bounds"):
        call = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, name=name, call=call, **more: order.append(name) or call(*args, **more),
        )
    model, _ = qoff.load(checkpoint)
    model.close()
    assert order == ["load_tokenizer", "default_bounds"]


def test_the_tokenizer_pads_on_the_left(tokenizer: Any) -> None:
    assert tokenizer.padding_side == "left"
    assert tokenizer(["a", "bcd"], padding=True).attention_mask == [[0, 0, 1], [1, 1, 1]]


def test_memory_is_given_in_bytes_or_as_text(checkpoint: Path) -> None:
    least, everything = load_budgets(checkpoint)
    for memory in (least, str(least), f"{-(-least // 1024)}KiB"):
        model, _ = qoff.load(checkpoint, device_memory=memory)
        with model.runtime:
            assert model.stats().arena_peak <= -(-least // 1024) * 1024 < everything
    with pytest.raises(BudgetError, match=f"at least {least:,}"):
        qoff.load(checkpoint, device_memory="1kB")
    with pytest.raises(QoffError, match="'lots' is not a size"):
        qoff.load(checkpoint, device_memory="lots")


def test_models_that_are_not_supported_are_refused(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    config = json.loads((copy / "config.json").read_text())
    for changes in ({"hidden_act": "tanhshrink"}, {"model_type": "bert"}):
        (copy / "config.json").write_text(json.dumps({**config, **changes}))
        ((name, value),) = changes.items()
        message = f"{name} is {value!r}"
        with pytest.raises(UnsupportedModelError, match=message):
            check_source(copy)  # which `qoff serve` asks before it listens
        with pytest.raises(UnsupportedModelError, match=message):
            qoff.load(copy, cache_dir=tmp_path / "cache")
    (copy / "config.json").rename(copy / "adapter_config.json")
    with pytest.raises(UnsupportedModelError, match="is an adapter, without the model"):
        qoff.load(copy, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_closed_model_says_so(checkpoint: Path) -> None:
    model, _ = qoff.load(checkpoint)
    model.close()
    for use in (model, model.generate):
        with pytest.raises(ClosedError, match="the model is closed"):
            use(torch.tensor([[5, 6]]))


def test_a_model_that_nobody_holds_gives_everything_back(checkpoint: Path) -> None:
    gc.collect()
    threads = set(threading.enumerate())
    for _ in range(3):
        model, _ = qoff.load(checkpoint)
        model(IDS)
        arena = weakref.ref(model.runtime.store.arena)
        del model
        gc.collect()
        left = [t.name for t in set(threading.enumerate()) - threads if "cpu" not in t.name]
        assert left == []
        assert arena() is None


@pytest.mark.parametrize("path", [None, 123, b"path"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ArgumentError, match="is neither a path nor"):
        qoff.load(path)


@pytest.mark.parametrize("opening", [qoff.load, open_runtime])
def test_a_bound_without_a_meaning_is_refused(checkpoint: Path, opening: Any) -> None:
    with pytest.raises(ArgumentError, match="host_memory holds what device_memory has no room for"):
        opening(checkpoint, device="cpu", host_memory="50MiB")


@pytest.mark.parametrize("options", [{"slots": 1, "device_memory": 10**9}, {"device_memory": -5}])
def test_bad_arguments_are_refused(checkpoint: Path, options: dict[str, int]) -> None:
    with pytest.raises(QoffError):
        qoff.load(checkpoint, **options)
