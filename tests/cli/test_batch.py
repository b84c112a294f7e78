"""`qoff batch`: a line for each request, whatever the plan, and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from qoff.api.protocol import Count
from qoff.jobs.file import FileJob
from qoff.plan import Plan, default
from tests.cli.test_cli import fail, run, succeed
from tests.module_models import module_checkpoint
from tests.tiny_models import tiny_checkpoint


@pytest.fixture(scope="module")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts"
    path.write_text('first prompt\n{"prompt": "second"}\n\n"third"\n')
    return path


BATCH = ["--batch-size", 2, "--context", 128, "--raw", "--max-tokens", 5]


def answered(text: str) -> dict[int, dict[str, Any]]:
    """Answers by the number of the prompt."""
    return {value["index"]: value for value in map(json.loads, text.splitlines())}


def test_batch_prints_a_line_for_each_answer_whatever_the_plan(
    packable: Path, prompts: Path, tmp_path: Path
) -> None:
    plain = answered(succeed("batch", packable, prompts, *BATCH))
    assert sorted(plain) == [0, 1, 2]
    assert {r["prompt_tokens"] for r in plain.values()} == {len("first prompt"), 6, 5}
    assert all(1 <= len(r["token_ids"]) <= 5 and "error" not in r for r in plain.values())
    trace = tmp_path / "trace.json"
    result = run(
        "batch", packable, prompts, *BATCH, "--kv-device", 0, "--activations", "host", "--batches",
        2, "--stats", "--trace", trace, "--max-memory", "cpu=1GiB", "--spill-folder", tmp_path,
        "--cache-dir", tmp_path,
    )  # fmt: skip
    assert answered(result.stdout) == plain
    assert "waited for" in result.stderr
    assert "disk: KV blocks" in result.stderr
    assert json.loads(trace.read_text())["traceEvents"]


def test_batch_takes_models_of_transformers_modules(
    prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = module_checkpoint(tmp_path_factory.getbasetemp(), "bloom")
    found = answered(succeed("batch", path, prompts, *BATCH, "--device", "cpu"))
    assert [len(one["token_ids"]) > 0 for one in found.values()] == 3 * [True]


def test_batch_takes_sampling_parameters(packable: Path, prompts: Path) -> None:
    options = ["--ignore-eos", "--logprobs", 2, "--repetition-penalty", 1.5]
    options += ["--temperature", 0, "--top-k", -1]
    for answer in answered(succeed("batch", packable, prompts, *BATCH, *options)).values():
        assert (len(answer["token_ids"]), answer["finish_reason"]) == (5, "length")
        assert [len(step) >= 2 for step in answer["logprobs"]] == [True] * 5
        assert answer["logprobs"][0][str(answer["token_ids"][0])]["logprob"] < 0


def test_batch_gives_as_many_log_probabilities_as_the_server(tmp_path: Path) -> None:
    most = TypeAdapter(Count).json_schema()["maximum"]
    asked = ["batch", tmp_path / "gone", tmp_path / "prompts.txt", "--logprobs"]
    assert "no such file" in fail(*asked, most)
    result = run(*asked, most + 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"less than or equal to {most}" in result.stderr


def test_batch_goes_on_after_a_prompt_that_cannot_be_answered(
    packable: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompts"
    path.write_text("a" * 200 + "\nshort\n")
    result = run("batch", packable, path, *BATCH)
    assert result.exit_code == 1
    found = answered(result.stdout)
    assert found[1]["finish_reason"] in ("length", "stop")
    assert "no room for an answer in the plan's context of 128" in found[0]["error"]


def test_batch_says_why_nothing_is_left(packable: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "prompts", tmp_path / "out"
    path.write_text("")
    result = run("batch", packable, path, *BATCH)
    assert (result.exit_code, result.stderr) == (0, f"{path}: has no requests\n")
    path.write_text('{"text": "x"}\n')
    for _ in range(2):
        result = run("batch", packable, path, "-o", out, *BATCH)
        assert result.exit_code == 1
    assert f"nothing is left to do; 1 failed: delete {out}.errors.jsonl" in result.stderr


def test_batch_names_a_line_that_is_no_prompt(packable: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('good\n{"text": "x"}\n')
    result = run("batch", packable, path, *BATCH)
    assert result.exit_code == 1
    wrong = answered(result.stdout)[1]
    assert (wrong["line"], wrong["error"]) == (2, 'the line is neither text nor {"prompt": text}')


def test_batch_goes_on_with_its_file(packable: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ["batch", packable, "-i", prompts, "-o", out, *BATCH]
    result = run(*options)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "3 of 3 done, 0 failed" in result.stderr
    whole = out.read_bytes()
    out.write_bytes(whole[: whole.index(b"\n") + 9])
    assert run(*options, "--keep-order").exit_code == 0
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert [one["index"] for one in map(json.loads, out.read_text().splitlines())] == [0, 1, 2]
    assert "parameters temperature was 0.0 and is 0.5" in fail(*options, "--temperature", 0.5)
    assert run(*options, "--temperature", 0.5, "--overwrite").exit_code == 0
    assert "give one file" in fail("batch", packable, *BATCH)
    assert "are all the same" in fail("batch", packable, prompts, *BATCH, "--n", 2)
    assert "--keep-order needs a file" in fail("batch", packable, prompts, *BATCH, "--keep-order")


def test_options_of_a_plan_leave_the_rest_to_what_is_free(
    packable: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says what the planner would choose leaves it nothing but the bounds."""
    plans, out = list[Plan](), tmp_path / "out.jsonl"
    free = {"device": 24 << 20, "host": 0, "disk": 1 << 30}
    monkeypatch.setattr(FileJob, "run", lambda job, llm, noticed: plans.append(llm.plan))
    monkeypatch.setattr(default, "usable_memory", lambda *_: free)
    searched = ["--context", 1024, "--kv", 8, "-o", out]
    for options in (searched, ["--batch-size", 8, "--context", 128]):
        assert run("batch", packable, prompts, *options).exit_code == 0
    chosen, given = plans
    assert (chosen.context, chosen.kv.k_bits) == (1024, 8)
    assert chosen.device_memory is not None
    assert chosen.device_memory <= free["device"]
    assert (given.batch_size, given.batches, given.device_memory) == (8, 1, free["device"])
    refused = fail("batch", packable, prompts, *searched, "--context", 512)
    assert "context was 1024 and is 512" in refused


def test_a_batch_has_room_for_all_answers_of_a_prompt(
    packable: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody said how large batches are, which are 8 sequences otherwise."""
    plans = list[Plan]()
    monkeypatch.setattr(FileJob, "run", lambda job, llm, noticed: plans.append(llm.plan))
    options = ["--context", 128, "--n", 9, "--temperature", 1]
    succeed("batch", packable, prompts, *options)
    assert plans[0].batch_size == 9
    free = {"device": 24 << 20, "host": 0, "disk": 1 << 30}
    monkeypatch.setattr(default, "usable_memory", lambda *_: free)
    many = fail("batch", packable, prompts, *options[:2], "--n", 1000, *options[4:])
    assert "--n 1000: the answers of a prompt are in one batch" in many
    assert len(plans) == 1


def test_batch_refuses_options_that_it_would_not_use(
    packable: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--ray auto" in fail("batch", packable, prompts, "--ray-workers", 2)
    heated = ["--batch-size", 2, "--temperature", 1, "--n", 3]
    monkeypatch.setattr("qoff.hf.checkpoints.find_checkpoint", None)
    assert "--n 3: the answers of a prompt" in fail("batch", packable, prompts, *heated)
    monkeypatch.undo()
    monkeypatch.setattr("qoff.engine.LLM", None)  # it is said before one is opened
    unknown = fail("batch", packable, prompts, "--stop-token-ids", 3, "--stop-token-ids", 9999)
    assert "--stop-token-ids 9999: the model has tokens 0 to " in unknown
    monkeypatch.undo()
    assert "-o FILE" in fail("batch", packable, prompts, "--overwrite")
    alone = ["--device", "cpu", "--host-memory", "1GiB"]
    # It is said before a conversion.
    monkeypatch.setattr("qoff.hf.checkpoints.find_checkpoint", None)
    assert "needs that bound, too" in fail("batch", packable, prompts, *alone)
    monkeypatch.undo()
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    prompts.write_text(json.dumps(asked) + "\n")
    assert "leave out --raw and the options" in fail("batch", packable, prompts, "--temperature", 0)


def test_batch_refuses_experts_for_the_cpu_on_a_cpu(packable: Path, prompts: Path) -> None:
    assert "a CPU computes all experts" in fail("batch", packable, prompts, "--cpu-experts")
    alone = fail("batch", packable, prompts, "--cpu-expert-tokens", "4")
    assert "cpu_expert_tokens needs cpu_experts" in alone


def test_batch_refuses_types_and_devices_that_are_not_there(packable: Path, prompts: Path) -> None:
    assert "a CPU computes in float32" in fail(
        "batch", packable, prompts, *BATCH, "--device", "cpu", "--dtype", "float16"
    )
    assert "no device is called 'tpu:0'" in fail(
        "batch", packable, prompts, *BATCH, "--device", "tpu:0"
    )


def test_batch_ends_cleanly_when_told_to(packable: Path, tmp_path: Path) -> None:
    """What is done is on standard output; the rest is given up within seconds."""
    path, log = tmp_path / "prompts", tmp_path / "log"
    path.write_text("prompt\n" * 2000)
    arguments = [sys.executable, "-m", "qoff.cli.main", "batch", packable, path, *BATCH]
    with log.open("w") as out:
        process = subprocess.Popen([str(a) for a in arguments], stdout=out)
        try:
            while log.stat().st_size == 0 and process.poll() is None:
                time.sleep(0.05)
            process.terminate()
            assert process.wait(60) == 143
        finally:
            process.kill()
    assert all("index" in json.loads(line) for line in log.read_text().splitlines())
