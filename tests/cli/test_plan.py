"""`qoff plan` and `qoff env --measure`: what they print and write; errors are one line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qoff.checkpoint.layout import OUTER_FILE
from qoff.plan.saved import read_plan, read_weights
from qoff.units import parse_size
from tests.cli.commands import fail, run, succeed
from tests.module_models import module_checkpoint, module_source
from tests.plan.machines import MIB, MIXTURE, SMALL, machine
from tests.tiny_models import save_model, tiny_checkpoint

WORK = ("--prompt", "64-128", "--tokens", "16", "--requests", "8", "--brief")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(machine(device=6 * MIB).text())
    return path


def test_a_plan_is_explained_saved_and_run(
    here: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    out = tmp_path / "plan.json"
    found = run("plan", model, "--machine", here, *WORK, "--save", out, "--json")
    assert found.exit_code == 0, found.output
    printed = json.loads(found.stdout)
    assert printed["phases"]["decode"]["limit"] in printed["phases"]["decode"]["busy_s"]
    assert sum(printed["bytes"]["device"].values()) <= 6 * MIB
    file = (model / "tokenizer.json").stat().st_size
    assert printed["tokenizer_bytes"] >= file  # beside these
    plan = read_plan(out)
    assert plan.device_memory == printed["plan"]["device_memory"]
    assert (plan.slots, plan.kv.k_bits) == (
        printed["plan"]["slots"],
        printed["plan"]["kv"]["k_bits"],
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\n")
    done = run("batch", model, prompts, "--plan", out, "--max-tokens", 2, "--raw")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["prompt_tokens"] == 2
    for option in (
        ("--device-memory", "1GiB"),
        ("--kv", "4,2"),
        ("--kv-target-bits", 3.5),
        ("--attention-top", 1.0),  # also where it is the default
        ("--batch-size", 8),
        ("--slots", 2),
    ):
        both = run("batch", model, prompts, "--plan", out, *option)
        assert both.exit_code == 1
        assert f"--plan says what {option[0]} would" in both.output
        if option[0] == "--batch-size":
            continue
        both = run("generate", model, "Hi", "--plan", out, *option)
        assert both.exit_code == 1
        assert f"--plan says what {option[0]} would" in both.output
    timed = ("bench", model, "-p", "none", "-n", 1, "-r", 1, "-o", "json", "--plan", out)
    setup = json.loads(run(*timed).stdout)["settings"]
    assert parse_size(setup["device_memory"]) == plan.device_memory
    assert (setup["kv"], setup["slots"]) == (["4,4"], plan.slots)
    assert "--plan says what --slots would" in run(*timed, "--slots", 2).output
    more = tmp_path / "more.json"
    kept = json.loads(out.read_text())
    more.write_text(json.dumps({**kept, "kv": {**kept["kv"], "window": 128}}))
    assert "more than the bits 4,4" in run(*timed[:-1], more).output
    drafted = run("batch", model, prompts, "--plan", out, "--draft-tokens", 2, "--share-prefixes")
    assert drafted.exit_code == 0, drafted.output


def test_a_plan_has_what_answers_are_computed_with(
    config: Path, here: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    how = ("--shared", 0.5, "--attention-top", "on", "--activation-bits", 8)
    found, plain = (
        run("plan", config, "--machine", here, *WORK, *more, "--json")
        for more in ((*how, "--save", out), ())
    )
    assert found.exit_code == 0, found.output
    plan = read_plan(out)
    assert (plan.share_prefixes, plan.kv.attention_top, plan.activation_bits) == (True, 0.6, 8)
    read = list[float]()  # tokens
    for one in map(json.loads, (found.stdout, plain.stdout)):
        each = one["plan"]["batches"] * one["plan"]["prefill_tokens"]
        read.append(one["phases"]["prefill"]["rounds"] * each)
    assert read[0] == pytest.approx(read[1] / 2)


def test_recurrent_states_that_are_shared_are_counted(here: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_model(path, "qwen3-next-head64")
    taken = list[float]()  # by as many as there are of them
    for more in ((), ("--shared", 0.5)):
        found = run("plan", path / "config.json", "--machine", here, *WORK, *more, "--json")
        one = json.loads(found.stdout)
        sequences = one["plan"]["batches"] * one["plan"]["batch_size"]
        taken.append(
            one["bytes"]["device"]["states"] / (sequences + len(more[:1]) * (sequences + 1))
        )
    assert taken[1] == taken[0] > 0


def test_a_plan_of_a_mixture_takes_recorded_routes(
    config: Path, here: Path, tmp_path: Path
) -> None:
    mixture, routes = tmp_path / "mixture.json", tmp_path / "routes.json"
    mixture.write_text(json.dumps(MIXTURE))
    layers = range(MIXTURE["num_hidden_layers"])
    recorded = [[layer, [0, 1, 2, 3]] for _ in range(8) for layer in layers]  # always the same
    routes.write_text(json.dumps({"routes": recorded, "tokens": 8}))
    on = ("--machine", here, "--host", "12MiB", *WORK)
    assumed, known = (
        json.loads(run("plan", mixture, *on, *more, "--json").stdout)
        for more in ((), ("--routes", routes))
    )
    assert assumed["expert_hits"] < 0.9 < known["expert_hits"]
    assert any("what is published" in note for note in assumed["warnings"])
    assert any("that were recorded" in note for note in known["warnings"])
    refused = run("plan", config, *on, "--routes", routes)
    assert refused.exit_code == 1
    assert "the model has none" in refused.output
    for text, what in (
        ('{"tokens": 8}', "has no routes"),
        ('{"tokens": 1, "routes": [[0, [3, 3]]]}', "is no layer and its experts"),
        ('{"tokens": 2, "routes": [[0, [3]]]}', "not those of 2 single tokens"),
        ('{"tokens": 1, "routes": [[0, [3]]]}', "model takes 4 of 32 in 10"),
    ):
        routes.write_text(text)
        refused = run("plan", mixture, *on, "--routes", routes)
        assert refused.exit_code == 1
        assert what in refused.output
        assert refused.output.count("\n") == 1


def test_memory_is_drawn_against_speed(
    config: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "front"
    found = run("plan", config, "--machine", here, *WORK, "--plot", out)
    assert found.exit_code == 0, found.output
    assert f"written: {out}.svg" in found.output.replace("\n", "")
    assert "tokens/s" in (tmp_path / "front.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = run("plan", config, "--machine", here, *WORK, "--plot", out)
    assert refused.exit_code == 1
    assert "matplotlib" in refused.output


def test_a_model_without_weights_on_a_gpu_that_is_not_here(config: Path) -> None:
    found = run("plan", config, "--gpu", "24GiB", "--link", "25GB/s", *WORK)
    assert found.exit_code == 0, found.output
    assert "no offloading is needed" in found.stdout
    assert "what lives where" in found.stdout
    assert "faster, by the model alone" in found.stdout  # than the plan, at most


@pytest.mark.parametrize("name", ["stablelm", "deepseek_v4"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_model_of_transformers_modules_is_planned_saved_and_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str, on_gpu: bool
) -> None:
    """On a GPU with packed K and V, or without."""
    base, out, here = tmp_path_factory.getbasetemp(), tmp_path / "plan.json", tmp_path / "here.json"
    here.write_text(machine(device=64 * MIB).text())
    where = ("--gpu", "1GiB") if on_gpu else ("--machine", here)
    source = module_source(base, name)
    lengths = ("--prompt", "16-24", "--tokens", "8", "--requests", "2", "--save", out)
    found = run("plan", source, *where, *lengths, "--max-kl", 0.5)
    assert found.exit_code == 0, found.output
    assert "what lives where" in found.stdout
    memory = run("plan", source, "--memory", "--json")
    assert json.loads(memory.stdout)["parameters"] > 50_000
    if on_gpu:
        return
    planned = run("plan", module_checkpoint(base, name), *where, *lengths, "--json")
    assert planned.exit_code == 0, planned.output
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\n")
    model = module_checkpoint(base, name)
    done = run("batch", model, prompts, "--plan", out, "--max-tokens", 2, "--raw")
    assert done.exit_code == 0, done.output


def test_a_disk_has_room_for_the_checkpoint_and_what_the_plan_spills(
    config: Path, here: Path, tmp_path: Path
) -> None:
    ask = ("--machine", here, *WORK, "--json", "--disk")
    large = json.loads(run("plan", config, *ask, "1GiB").stdout)
    checkpoint, free = large["checkpoint_bytes"], large["usable"]["disk"]
    assert free == (1 << 30) - checkpoint
    spilled = sum(large["bytes"]["disk"].values())
    for less in (0, spilled // 2):  # plans that spill no more than is left
        exact = checkpoint + spilled - less
        found = json.loads(run("plan", config, *ask, f"{exact}").stdout)
        assert sum(found["bytes"]["disk"].values()) <= found["usable"]["disk"] == exact - checkpoint
        assert not [note for note in found["warnings"] if "the checkpoint takes" in note]
    refused = run("plan", config, *ask, f"{checkpoint - MIB}")
    assert refused.exit_code == 1
    assert "disk: the checkpoint takes" in refused.output
    assert "1.0 MiB more than the" in refused.output
    assert refused.output.count("\n") == 1


def test_bits_are_chosen_for_the_disk_that_their_checkpoint_leaves(
    config: Path, here: Path
) -> None:
    ask = ("--machine", here, *WORK, "--brief", "--json", "--max-kl", 0.0107)
    large = json.loads(run("plan", config, *ask, "--disk", "1GiB").stdout)
    refused = run("plan", config, *ask, "--disk", large["checkpoint_bytes"] - MIB)
    assert refused.exit_code == 1
    assert "weights of 8 bits" in refused.output
    assert "disk: the checkpoint takes" in refused.output


def test_groups_that_do_not_divide_the_columns_are_no_choice(here: Path, tmp_path: Path) -> None:
    save_model(tmp_path, "llama-head64", intermediate_size=96)
    ask = ("--machine", here, *WORK, "--brief", "--json", "--max-kl", 1)
    found = run("plan", tmp_path, *ask)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["form"]["weights"]["group_size"] == 32


def test_a_place_in_no_folder_is_refused(config: Path, tmp_path: Path) -> None:
    for option in ("--save", "--plot"):
        refused = run("plan", config, option, tmp_path / "nowhere" / "plan.json")
        assert refused.exit_code == 1
        assert f"qoff: {option} " in refused.output
        assert "is no folder; make it first" in refused.output
        assert "is a folder; name a file" in fail("plan", config, option, tmp_path)


def test_the_disk_of_a_checkpoint_that_is_there_is_all_free(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    found = run("plan", model, "--machine", here, *WORK, "--json", "--disk", "64KiB")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["usable"]["disk"] == 64 << 10


def test_a_checkpoint_at_the_place_of_none_is_another_model(
    config: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose config alone is known has no folder, whatever the working directory has."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / OUTER_FILE).touch()
    monkeypatch.chdir(tmp_path)
    ask = ("--machine", here, *WORK, "--json", "--disk", "1GiB")
    found = json.loads(succeed("plan", config, *ask))
    assert found["usable"]["disk"] == (1 << 30) - found["checkpoint_bytes"]


def test_a_checkpoint_is_planned_by_its_config_too(here: Path, checkpoint: Path) -> None:
    ask = ("--machine", here, *WORK, "--json")
    folder, file = (
        json.loads(succeed("plan", one, *ask)) for one in (checkpoint, checkpoint / "config.json")
    )
    for same in ("checkpoint_bytes", "tokenizer_bytes", "bound_s"):
        assert folder[same] == file[same]


def test_a_checkpoint_on_the_hub_is_to_be_downloaded(
    here: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(checkpoint))
    refused = fail("plan", "someone/packed-model", "--machine", here, *WORK)
    assert "someone/packed-model: is a qoff checkpoint" in refused
    assert "download it (hf download), and plan its folder" in refused


@pytest.mark.parametrize(
    ("how", "option"),
    [
        ((), ("--bits", 4)),
        (("--memory",), ("--group-size", 32)),
        (("--train", "--lora", "r=8"), ("--solver", "hqq")),
    ],
)
def test_the_bits_of_a_checkpoint_are_given(
    checkpoint: Path, how: tuple[str, ...], option: tuple[object, ...]
) -> None:
    refused = fail("plan", checkpoint, *how, *option)
    assert f"whose weights are quantized already; leave out {option[0]}" in refused


def test_a_model_for_a_cpu_is_to_be_converted_for_it(config: Path, here: Path) -> None:
    """Its plan counts weights that are packed so."""
    ask, gpu = ("--machine", here, *WORK, "--max-kl", 1), ("--gpu", "1GiB", "--host", "64MiB")
    for more, packed in ((), True), (gpu, False):
        lines = succeed("plan", config, *ask, *more).splitlines()
        (line,) = (line for line in lines if line.startswith("to have it: qoff convert"))
        assert line.endswith(" --for cpu") == packed


def test_bits_are_what_a_loss_allows(config: Path, here: Path, tmp_path: Path) -> None:
    def form(*options: object) -> dict[str, Any]:
        found = run("plan", config, "--machine", here, *WORK, "--json", *options)
        assert found.exit_code == 0, found.output
        kept: dict[str, Any] = json.loads(found.stdout)["form"]
        return kept

    assert form("--max-kl", 1)["form"].startswith("weights of 3 bits in groups of 32")
    assert form("--max-kl", 0.11)["form"].startswith("weights of 4 bits in groups of 64")
    close = form("--max-kl", 0.0107)
    assert "8 bits" in close["form"]
    layers, head, cache = 0.0002, 0.0042, 0.0061  # docs/accuracy.md, with a head of 6 bits
    assert close["kl"] == pytest.approx(layers + head + cache)
    assert close["assumed"]
    out = tmp_path / "plan.json"
    mixed = form("--max-kl", 0.04, "--save", out)
    assert 4.5 < mixed["weights"]["target_bits"] < 8.5
    assert mixed["kl"] <= 0.04
    assert asdict(read_weights(out)) == mixed["weights"]
    assert read_plan(out).kv.k_bits in (4, 8)
    ask = ("--machine", here, *WORK, "--max-kl", 0.04)
    (line,) = (x for x in succeed("plan", config, *ask).splitlines() if x.startswith("to have it"))
    options = line.partition("FOLDER ")[2].split()  # these are taken; the model is no longer there
    assert "no such file" in fail("convert", tmp_path / "gone", tmp_path / "out", *options)
    cell = {"weights": "4 bits, group 32, hqq", "kv": "8,4, window 64", "mean_kl": 0.004}
    other = {"weights": "4 bits, group 64, rtn", "kv": "4,4, window 64", "mean_kl": 0.5}
    (tmp_path / "results.json").write_text(json.dumps([cell, other]))
    measured = form("--max-kl", 0.007, "--losses", tmp_path)
    assert (measured["kl"], "groups of 32, hqq" in measured["form"]) == (0.004, True)


@pytest.mark.parametrize("lora", [(), ("--lora", "r=8")])
def test_a_training_is_planned(config: Path, here: Path, lora: tuple[str, ...]) -> None:
    on = ("--machine", here, "--host", "256MiB", "--disk", "1GiB")
    work = ("--train", *lora, "--sequence", 64, "--micro-batches", 2)
    found = run("plan", config, *on, *work, "--json")
    assert found.exit_code == 0, found.output
    printed = json.loads(found.stdout)
    assert printed["tokens"] == 128
    assert (printed["learned"] < printed["parameters"]) == bool(lora)
    assert printed["limit"] in printed["phases"]["backward"]["busy_s"]
    shown = run("plan", config, *on, *work)
    assert shown.exit_code == 0, shown.output
    assert "qoff finetune" in shown.output


def test_sequences_of_a_training_end_where_learned_positions_do(here: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"model_type": "gpt2"}))
    found = run("plan", path, "--machine", here, "--train", "--sequence", 5000)
    assert found.exit_code == 1
    assert "has 5,000 tokens, and this model has positions for 4,096" in found.output


def test_memory_by_the_formulas(config: Path) -> None:
    found = run("plan", config, "--memory", "--json")
    assert found.exit_code == 0, found.output
    printed = json.loads(found.stdout)
    assert printed["bytes"]["inference: weights, 16 bits"] == 2 * printed["parameters"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--link", "fast", "--gpu", "1GiB"], "--link"),
        (["--link", "25", "--gpu", "1GiB"], "--link: '25' has no unit"),
        (["--link", "2.5", "--gpu", "1GiB"], "--link: '2.5' has no unit"),
        (["--gpu", "much"], "--gpu"),
        (["--gpu", "1GiB", "--gpu-rates", "1TB/s"], "--gpu-rates"),
        (["--machine", "/no/such/file"], "/no/such/file"),
        (["--prompt", "9-3"], "--prompt: '9-3' is no length: 9 is more than 3"),
        (["--tokens", "long"], "--tokens: 'long'"),
        (["--objective", "speed"], "objective"),
        (["--kv", "none"], "--kv"),
        (["--prompt", "100000"], "more than the"),
        (["--max-kl", "0.01"], "8,4 bits loses 0.0105; allow 0.0106"),
        (["--max-kl", "1", "--losses", "/dev/null"], "sweep"),
        (["--losses", "/dev/null"], "--losses needs --max-kl"),
        (["--max-kl", "1", "--kv", "4"], "leave out --kv"),
        (["--max-kl", "1", "--group-size", "32"], "leave out --group-size"),
        (["--max-kl", "1", "--gpu", "1MiB"], "weights of 3 bits in groups of 32"),
        (["--train", "--kv", "4"], "--train plans no answers; leave out --kv"),
        (["--train"], "more than the 6.0 MiB there"),
        (["--train", "--bits", "8"], "--train without --lora plans for all weights to learn"),
        (["--lora", "r=8"], "--train is missing, and belongs to --lora"),
        (["--train", "--lora", "r=8", "--dtype", "float32"], "leave --dtype out"),
        (["--device", "cpu"], "--machine says what computes"),
        (["--gpu-rates", "1TB/s,1T"], "that --gpu describes"),
        (["--link", "1GB/s"], "there is none"),
        (["--disk-rate", "9999999999999999999TB/s"], "1e+18 at most"),
        (["--peak", "1T"], "--memory is missing"),
        (["--sequence", "64"], "--memory or --train is missing"),
        (["--memory", "--gpu", "1GiB"], "leave out --gpu"),
        (["--activation-bits", "5"], "8 or 16"),
        (["--max-kl", "1", "--activation-bits", "8"], "leave out --activation-bits"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_is_wrong_is_one_line(
    config: Path, here: Path, arguments: list[str], what: str
) -> None:
    on = [] if "--machine" in arguments else ["--machine", here]
    found = run("plan", config, *on, *arguments)
    assert found.exit_code == 1
    assert what in found.output
    assert found.output.count("\n") == 1
