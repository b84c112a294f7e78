"""`qoff convert` with formats by matrix, targets, and a text to calibrate on."""

from __future__ import annotations

import json
import random
import shutil
import string
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qoff.checkpoint import Checkpoint, QuantEntry, verify
from qoff.cli.convert import Target, loss_sentence
from qoff.eval.texts import CALIBRATION_TEXT
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from qoff.plan.forms import WeightForm
from qoff.plan.saved import plan_text
from qoff.quant import Format, QuantConfig
from tests.cli.test_cli import FAST, fail, succeed
from tests.cli.test_trust import TOKENIZER
from tests.models.gguf_model import Model
from tests.tiny_models import save_model, save_tokenizer

HAL = "hal.HalTokenizer"
LONG = "".join(random.Random(0).choices(string.ascii_letters + " ", k=4000))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("convert") / "model"
    save_model(path, "llama", max_position_embeddings=1024, num_hidden_layers=2)
    save_tokenizer(path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(LONG)
    return path


@pytest.fixture
def checkpoint(source: Path, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    succeed("convert", source, path, *FAST, "--no-measure")
    return path


def formats(path: Path) -> set[Format]:
    """Formats of the matrices in layers."""
    verify(path)
    entries = [e for file in Checkpoint.open(path).layers for e in file.weights.values()]
    return {Format(e.bits, e.group_size) for e in entries if isinstance(e, QuantEntry)}


def test_formats_by_name(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    succeed("convert", source, out, *FAST, "--weight", "*.o_proj=8,64", "--weight", "*.0.*=8,32")
    assert formats(out) == {Format(4, 32), Format(8, 64), Format(8, 32)}


@pytest.mark.parametrize("target", [("--target-bits", "5.5"), ("--max-kl", "0.01")])
def test_formats_for_a_target(
    target: tuple[str, str], source: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    printed = succeed("convert", source, out, *FAST, *target, "--calibration", text, "--json")
    result = json.loads(printed)
    assert len(formats(out)) > 1
    assert sum(result["formats"].values()) == 8
    if target[0] == "--target-bits":
        assert 5.2 < result["bits_per_weight"] <= 5.5
    else:
        assert 0 < result["loss"] <= 0.01


def test_a_plan_says_which_bits(source: Path, text: Path, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    plan.write_text(plan_text(Plan(), WeightForm(4, 32, "rtn", 5.5)))
    options = ("--plan", plan, "--calibration", text, "--no-measure")
    result = json.loads(succeed("convert", source, out, *options, "--json"))
    assert 5.2 < result["bits_per_weight"] <= 5.5
    assert result["solver"] == "rtn"
    assert "leave out --bits" in fail("convert", source, tmp_path / "no", *options, "--bits", 8)
    plan.write_text(plan_text(Plan()))
    assert "qoff plan --max-kl" in fail("convert", source, tmp_path / "no", *options)


def test_a_tokenizer_of_own_code_reads_the_text(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("sys.path", [*sys.path])
    model = shutil.copytree(source, tmp_path / "model")
    (model / "hal.py").write_text(TOKENIZER.format(ran=str(tmp_path / "ran")))
    file = model / "tokenizer_config.json"
    code = {"tokenizer_class": "HalTokenizer", "auto_map": {"AutoTokenizer": [None, HAL]}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **code}))
    options = ("--calibration", text, "--group-size", 32, "--no-measure", "--json")
    printed = succeed("convert", model, tmp_path / "out", *options, "--trust-remote-code")
    assert json.loads(printed)["solver"] == "gptq"
    assert (tmp_path / "ran").exists()


def test_a_target_is_told_as_a_sentence(source: Path, text: Path, tmp_path: Path) -> None:
    options = ("--target-bits", "5", "--calibration", text)
    printed = succeed("convert", source, tmp_path / "out", *FAST, *options)
    assert "bits a weight in layers (" in printed
    assert "nats a token, measured on the calibration text" in printed


def test_formats_that_were_chosen_are_solved_on_all_of_the_text(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def recorded(*args: Any, calibration: Tensor, **options: Any) -> Path:
        seen.append(len(calibration))
        return convert(*args, calibration=calibration, **options)

    monkeypatch.setattr("qoff.cli.convert.convert", recorded)
    options = ("--calibration", text, "--no-measure")
    succeed("convert", source, tmp_path / "out", *options)
    succeed("convert", source, tmp_path / "mixed", *options, "--target-bits", 5)
    assert seen == [4, 7]
    more = ("--calibration-tokens", 1024)
    succeed("convert", source, tmp_path / "less", *options, *more)
    succeed("convert", source, tmp_path / "less-mixed", *options, *more, "--target-bits", 5)
    assert seen == [4, 7, 2, 3]


def solver(path: Path) -> str:
    return str(Checkpoint.open(path).config["quantization_config"]["solver"])


def test_floats_are_calibrated_unless_that_is_no_use(
    source: Path, text: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "out", ("--group-size", "32", "--no-measure")
    succeed("convert", source, out, *options, "--calibration", text)
    assert formats(out) == {Format(4, 32)}
    assert solver(out) == "gptq"
    succeed("convert", source, tmp_path / "wide", *options, "--bits", 8)
    assert solver(tmp_path / "wide") == "hqq"
    bare = tmp_path / "bare"
    shutil.copytree(source, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    succeed("convert", bare, tmp_path / "no-tokenizer", *options)
    assert solver(tmp_path / "no-tokenizer") == "hqq"
    assert "tokenizer" in fail("convert", bare, tmp_path / "asked", *options, "--solver", "gptq")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--bits", 8), "hqq"),
        (("--bits", 8, "--weight", "*.down_proj=4,32"), "gptq"),
        (("--bits", 8, "--weight", "*.o_proj=8,64"), "hqq"),
        (("--weight", "*=8,32"), "hqq"),
        (("--weight", "*.down_proj=8,32"), "gptq"),
        (("--weight", "*=8,32", "--weight", "*.down_proj=6,32"), "gptq"),
        (("--target-bits", 6), "gptq"),
    ],
)
def test_auto_calibrates_where_any_matrix_may_get_fewer_than_8_bits(
    options: tuple[object, ...], expected: str, source: Path, text: Path, tmp_path: Path
) -> None:
    more = ("--calibration", text) if expected == "gptq" else ()
    succeed("convert", source, tmp_path / "out", *options, *more, "--no-measure")
    assert solver(tmp_path / "out") == expected


def test_a_text_comes_with_qoff(source: Path, text: Path, tmp_path: Path) -> None:
    options = ("--solver", "gptq", "--group-size", "32")
    succeed("convert", source, tmp_path / "own", *options, "--calibration", text)
    succeed("convert", source, tmp_path / "default", *options)
    succeed("convert", source, tmp_path / "named", *options, "--calibration", CALIBRATION_TEXT)
    own, default, named = (
        [file.sha256 for file in Checkpoint.open(tmp_path / name).layers]
        for name in ("own", "default", "named")
    )
    assert default == named != own


def test_options_that_a_quantized_model_does_not_heed_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Model("llama").write(tmp_path / "x.gguf")
    succeed("convert", file, tmp_path / "plain")
    assert not [one for one in caplog.messages if "keeps its codes" in one]
    succeed("convert", file, tmp_path / "out", "--bits", 8, "--solver", "rtn")
    (said,) = [one for one in caplog.messages if "keeps its codes" in one]
    assert "--bits, --solver changed only what was not" in said


@pytest.mark.parametrize("options", [(), ("--target-bits", 5)], ids=["plain", "target"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("taken", "taken: exists and is not a qoff checkpoint, so it is not overwritten"),
        ("taken/out", "taken is no folder that you may write to"),
        ("full", "full: exists and is not a qoff checkpoint, so it is not overwritten"),
        ("full --overwrite", "full: exists and is not a qoff checkpoint, so it is not overwritten"),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_a_text_is_read(
    place: str,
    message: str,
    options: tuple[object, ...],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qoff.cli.convert.calibration_ids", None)
    (tmp_path / "taken").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    where, *more = place.split()
    assert message in fail("convert", source, tmp_path / where, *more, *options)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (96, ("--group-size", 64), "model.embed_tokens: group size 64 does not divide its 96 "),
        (80, (), "mlp.down_proj: group size 32 does not divide its 80 columns, and no other does"),
    ],
)
def test_columns_that_no_group_divides_are_refused_before_formats_are_measured(
    columns: int,
    options: tuple[object, ...],
    message: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, more = tmp_path / "model", {"max_position_embeddings": 1024, "head_dim": 32}
    width = 96 if columns == 96 else 64
    save_model(model, "llama", hidden_size=width, intermediate_size=columns, **more)
    save_tokenizer(model)
    monkeypatch.setattr("qoff.eval.mixing.native.Layerwise", None)
    target = ("--target-bits", 5, "--calibration", text)
    assert message in fail("convert", model, tmp_path / "out", *target, *options)


def test_wider_rows_than_groups_of_64_divide_have_groups_of_32(text: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    save_model(model, "llama", intermediate_size=96, max_position_embeddings=1024)
    save_tokenizer(model)
    target = ("--target-bits", 5, "--calibration", text, "--no-measure")
    succeed("convert", model, out, *FAST, *target)
    entries = [entry for file in Checkpoint.open(out).layers for entry in file.weights.values()]
    groups = {e.group_size for e in entries if isinstance(e, QuantEntry) and e.shape[1] == 96}
    assert groups == {32}


def test_a_size_below_all_formats_is_refused_before_they_are_measured(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of 64, or of 32 where 64 do not divide the columns."""
    monkeypatch.setattr("qoff.eval.mixing.native.Layerwise", None)
    options = ("--target-bits", 2.2, "--calibration", text)
    said = fail("convert", source, tmp_path / "out", *options)
    assert "2.2 bits a weight are too few; the smallest formats take 2.500" in said


def test_a_size_above_all_formats_is_told(
    source: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--target-bits", 20, "--calibration", text, "--no-measure")
    succeed("convert", source, tmp_path / "out", *FAST, *options)
    (said,) = [one for one in caplog.messages if "more than formats can take" in one]
    assert "the largest take 7.941" in said


def test_what_is_no_model_is_refused_without_a_word_of_calibration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model").mkdir()
    assert "no model.safetensors" in fail("convert", tmp_path / "model", tmp_path / "out")
    assert not caplog.messages


@pytest.mark.parametrize("solver", ["auto", "hqq"])
@pytest.mark.parametrize("damage", ["config", "field", "gguf"])
def test_a_damaged_model_is_told_by_one_error_alone(
    damage: str, solver: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = shutil.copytree(source, tmp_path / "model")
    config = model / "config.json"
    if damage == "config":
        config.write_text("{")
    elif damage == "field":
        fields = {**json.loads(config.read_text()), "num_attention_heads": "two"}
        config.write_text(json.dumps(fields))
    else:
        model = Model("llama").write(tmp_path / "x.gguf")
        model.write_bytes(model.read_bytes()[:-4000])
    said = fail("convert", model, tmp_path / "out", "--solver", solver)
    assert ("num_attention_heads" if damage == "field" else str(model)) in said
    assert not caplog.messages


@pytest.mark.parametrize("why", ["too many weights", "no tokenizer"])
def test_what_is_not_measured_is_told(
    why: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out, model, said = tmp_path / "out", tmp_path / "model", "was not measured: "
    shutil.copytree(source, model)
    if why == "no tokenizer":
        for file in model.glob("tokenizer*"):
            file.unlink()
    else:
        monkeypatch.setattr("qoff.models.convert.loss._MANY_PRODUCTS", 1)
        said = f"would take minutes; later, `qoff eval {out} --reference {model}` measures it"
    assert "KL divergence" not in succeed("convert", model, out, *FAST)
    assert [one for one in caplog.messages if said in one]
    caplog.clear()
    succeed("convert", model, out, *FAST, "--no-measure", "--overwrite")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("bits", "kl", "better"), [(4, 0.06, 5), (3, 0.14, 4), (4, 0.4, 6), (6, 0.06, 8)]
)
def test_much_loss_is_told_with_the_bits_that_may_do(bits: int, kl: float, better: int) -> None:
    found = {"kl": kl, "kl_error": 0.01, "kl_tokens": 512}
    said = loss_sentence(found, QuantConfig(bits, solver="gptq"), Target())
    assert f"which is much (more than 0.05); --bits {better}, --max-kl 0.05 lose less" in said


@pytest.mark.parametrize(
    ("kl", "error", "written"),
    [
        (2.1e-05, 2.3e-07, "0.00002100 +- 0.00000023"),
        (0.0412, 0.00131, "0.0412 +- 0.0013"),
        (1.5, 0.2, "1.5000 +- 0.2000"),
        (0.0, 0.0, "0.0000 +- 0.0000"),
    ],
)
def test_a_loss_is_written_with_two_digits_of_its_error(
    kl: float, error: float, written: str
) -> None:
    found = {"kl": kl, "kl_error": error, "kl_tokens": 512}
    assert f": {written} nats" in loss_sentence(found, QuantConfig(), Target())


def test_codes_that_are_all_kept_are_told(tmp_path: Path) -> None:
    model = Model("llama").write(tmp_path / "x.gguf")
    said = succeed("convert", model, tmp_path / "out")
    assert "KL divergence from the source: 0, as all quantized weights keep their codes" in said


def test_a_layer_is_counted(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    assert ": 1 layer, " in succeed("convert", tmp_path / "model", tmp_path / "out", *FAST)


def test_a_conversion_that_loses_much_names_what_loses_less(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.cli.convert._MUCH", 1e-6)
    printed = succeed("convert", source, tmp_path / "four", *FAST)
    assert (
        ", which is much (more than 1e-06); --solver gptq, --bits 8, --max-kl 1e-06 lose less"
        in printed
    )
    printed = succeed("convert", source, tmp_path / "eight", *FAST, "--bits", 8)
    assert "--solver gptq, --max-kl 1e-06 lose less" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weight", "*.o_proj"], "is not NAME=BITS,GROUP"),
        (["--weight", "*.o_proj=7,64"], "--weight '*.o_proj=7,64': bits 7 is not supported"),
        (["--weight", "*.out=4,64"], "no matrix is called '*.out'"),
        (["--solver", "hqq", "--calibration", "TEXT"], "--calibration is for"),
        (["--solver", "hqq", "--calibration-tokens", "1024"], "--calibration-tokens is for"),
        (["--target-bits", "5", "--max-kl", "1", "--calibration", "TEXT"], "give one of them"),
        (["--target-bits", "5", "--weight", "*=8,32", "--calibration", "TEXT"], "leave one of"),
        (["--target-bits", "2", "--calibration", "TEXT"], "2 bits a weight are too few"),
        (["--target-bits", "5", "--bits", "8"], "choose the bits of all matrices in layers; leave"),
        (["--max-kl", "1", "--bits", "4"], "choose the bits of all matrices in layers; leave out"),
        (["--target-bits", "nan"], "--target-bits is nan; use a number above 0"),
        (["--max-kl", "0"], "--max-kl is 0; use a number above 0"),
        (["--max-kl", "1e-9", "--calibration", "TEXT"], "cannot be reached"),
        (["--max-kl", "1", "--calibration", "SHORT"], "has 5 tokens"),
        (["--max-kl", "1", "--calibration", "BINARY"], "not a text in UTF-8"),
    ],
)
def test_one_line_for_each_thing_that_can_go_wrong(
    options: list[str], message: str, source: Path, text: Path, tmp_path: Path
) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("hello")
    binary.write_bytes(b"\xff\xfe\x00")
    files = {"TEXT": text, "SHORT": short, "BINARY": binary}
    given = [files.get(option, option) for option in options]
    assert message in fail("convert", source, tmp_path / "out", "--group-size", "32", *given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [(), ("--overwrite",)], ids=["plain", "overwrite"])
@pytest.mark.parametrize("inside", ["", "original", "original/deep"])
def test_a_place_that_the_source_lies_in_is_refused(
    inside: str, options: tuple[str, ...], source: Path, checkpoint: Path
) -> None:
    model = checkpoint / inside if inside else checkpoint
    if inside:
        shutil.copytree(source, model)
    before = sorted(path.name for path in checkpoint.rglob("*"))
    said = fail("convert", model, checkpoint, *FAST, *options)
    assert f"the model to convert, {model}, lies there" in said
    assert sorted(path.name for path in checkpoint.rglob("*")) == before
