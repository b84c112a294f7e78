"""Jobs on a cluster of two machines, one of which is killed; all with one cluster."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from typer.testing import CliRunner

from qoff.cli.main import app
from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError, BudgetError, QoffError
from qoff.jobs.file import Asked, FileJob, fingerprint
from qoff.jobs.lines import Bits, Line, overview
from qoff.jobs.requests import Bad
from qoff.plan import Plan, default
from qoff.ray import ProcessorConfig, build_processor
from qoff.ray.job import LineWorker, _in_a_line, cluster, run
from qoff.ray.ledger import MOST, Answers, Ledger, groups
from qoff.ray.processor import RowReader, Shares, shares
from qoff.ray.source import LineSource
from qoff.ray.worker import Opening, Worker, _Shared, open_llm


def cluster_test(test: Callable[..., None]) -> Callable[..., None]:
    """Starts machines and kills them, which takes minutes. No deprecated option may be used."""
    asked = "QOFF_TEST_RAY" in os.environ
    for mark in (
        pytest.mark.timeout(300),
        pytest.mark.filterwarnings("error:.*will be removed in Ray"),
        pytest.mark.skipif(not asked, reason="takes minutes: make ray"),
    ):
        test = mark(test)
    return test


PLAN = Plan(batch_size=4, context=100, prefill_tokens=64)
PARAMS = SamplingParams(temperature=0, max_tokens=3)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def machines(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch_module.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch_module.setenv("PYTHONPATH", str(ROOT))  # of the workers
    monkeypatch_module.setenv("RAY_worker_niceness", "0")  # 15 starves them beside other tests
    size = {"num_cpus": 2, "object_store_memory": 80 << 20}
    found = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        found.other = found.add_node(**size)
        yield found
    finally:
        found.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patched:
        yield patched


def asked(folder: Path, name: str) -> Asked:
    return Asked(
        folder / "in.jsonl", folder / f"{name}.jsonl", None, "tiny", PARAMS, True, False, False
    )


def line(number: int, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 1 + number % 3, "temperature": 0}
    said = {"custom_id": f"id {number}", "method": "POST", "url": "/v1/completions"}
    return json.dumps({**said, "body": body})


def said(path: Path) -> dict[str, Any]:
    """Answers by id, without what every job names anew."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert max(Counter(one["custom_id"] for one in found).values()) == 1
    return {one["custom_id"]: one["response"]["body"]["choices"] for one in found}


class Mortal(LineWorker):
    """Dies of a prompt, as of a fault in compiled code."""

    def _run(self, reader: Any, lines: Any, key: Any) -> Answers:
        if any(b"poison" in one.data for one in lines):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._run(reader, lines, key)


@cluster_test
def test_killed_workers_and_machines_cost_no_answer(
    machines: Cluster, checkpoint: Path, tmp_path: Path
) -> None:
    """A request that kills its worker each time is an error, and the others are answered."""
    prompts = [f"text {i}" for i in range(40)]
    prompts[5] = "poison"
    lines = [line(i, prompt) for i, prompt in enumerate(prompts)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, lines[3], "{"]) + "\n")
    opening = Opening(str(checkpoint), {"plan": PLAN}, fingerprint(checkpoint))
    counts = []

    def noticed(found: Any) -> None:
        counts.append(found.ended)
        if len(counts) == 2:
            machines.remove_node(machines.other, allow_graceful=False)

    with (
        cluster(machines.address),
        FileJob(asked(tmp_path, "out"), checkpoint, PLAN, overwrite=False) as job,
    ):
        run(job, ProcessorConfig(str(checkpoint), batch_size=4), opening, noticed, Mortal)
        assert job.left == 0
        assert job.finish() == 3
    with (
        LLM(checkpoint, PLAN) as llm,
        FileJob(asked(tmp_path, "alone"), checkpoint, PLAN, overwrite=False) as job,
    ):
        job.run(llm, lambda _: None)
    wanted = said(tmp_path / "alone.jsonl")
    del wanted["id 5"]
    assert said(tmp_path / "out.jsonl") == wanted
    wrong = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    told = {one["line"]: one for one in map(json.loads, wrong)}
    assert set(told) == {6, 41, 42}
    assert f"ended, {MOST} times" in told[6]["response"]["body"]["error"]["message"]
    assert told[41]["error"]["code"] == "duplicate_custom_id"


@cluster_test
def test_a_dataset_goes_through_a_processor_once(
    machines: Cluster, checkpoint: Path, tmp_path: Path
) -> None:
    config = ProcessorConfig(
        str(checkpoint), {"plan": PLAN}, batch_size=4, id_column="id",
        checkpoint_path=str(tmp_path / "checkpoint"),
    )  # fmt: skip

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        params = {"temperature": 0.0, "max_tokens": 1 + row["id"] % 3}
        return {"id": row["id"], "prompt": texts[row["id"]], "sampling_params": params}

    def keep(row: dict[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in ("id", "generated_text", "__inference_error__")}

    texts = [f"text {i}" for i in range(6)] + ["x" * 200]
    with cluster(machines.address):
        for count in (4, 7):
            source = ray.data.range(count, override_num_blocks=1)
            build_processor(config, ask, keep)(source).write_parquet(str(tmp_path / "out"))
        rows = sorted(ray.data.read_parquet(str(tmp_path / "out")).take_all(), key=_id)
    assert [row["id"] for row in rows] == [*range(7)]
    with LLM(checkpoint, PLAN) as llm:
        params = [SamplingParams(temperature=0, max_tokens=1 + i % 3) for i in range(6)]
        wanted = [one.text for one in llm.generate(texts[:6], params)]
    assert [row["generated_text"] for row in rows[:6]] == wanted
    assert [row["__inference_error__"] for row in rows[:6]] == [None] * 6
    assert "no room" in rows[6]["__inference_error__"]


def _id(row: dict[str, Any]) -> int:
    return int(row["id"])


@cluster_test
def test_the_command_goes_on_on_a_cluster(
    machines: Cluster, checkpoint: Path, tmp_path: Path
) -> None:
    """With what a job on this machine alone has begun."""
    (tmp_path / "in.jsonl").write_text("".join(line(i, f"text {i}") + "\n" for i in range(9)))
    output = tmp_path / "out.jsonl"
    command = ["batch", str(checkpoint), "-i", str(tmp_path / "in.jsonl"), "-o", str(output)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[:4]))
    done = CliRunner().invoke(app, [*command, "--ray", machines.address])
    assert done.exit_code == 0, done.output
    assert sorted(said(output)) == [f"id {i}" for i in range(9)]
    assert output.read_bytes().splitlines(keepends=True)[:4] == whole[:4]


def test_what_cannot_be_is_said_in_a_line(checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match="on a machine of the cluster"), cluster("ray://x:1"):
        pass
    with pytest.raises(QoffError, match="is another model"):
        open_llm(Opening(str(checkpoint), {}, "0" * 64))
    folders = {"adapters": {"a": str(checkpoint)}}
    with pytest.raises(QoffError, match="are others than where the job was started"):
        open_llm(Opening(str(checkpoint), folders, adapters={"a": "0" * 64}))
    with pytest.raises(ArgumentError, match="both: id_column and checkpoint_path"):
        ProcessorConfig("m", id_column="id")
    with pytest.raises(ArgumentError, match="concurrency is 0"):
        ProcessorConfig("m", concurrency=0)


def test_ray_leaves_errors_of_workers_to_the_line_that_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for handler in logging.getLogger("ray.data").handlers:
        monkeypatch.setattr(handler, "level", handler.level)
    with cluster("local"):
        logging.getLogger("ray.data.exceptions").error("Full stack trace:")
    assert "stack trace" not in capsys.readouterr().err


def test_a_worker_that_cannot_open_its_model_says_so_at_its_first_block(checkpoint: Path) -> None:
    """Not before: of what ends its beginning Ray prints the traceback."""
    worker = Worker(Opening(str(checkpoint), {"device_memory": 1024}), None)
    with pytest.raises(BudgetError, match="the budget is 1,024"):
        _ = worker.llm


@pytest.mark.parametrize("job", ["a job", None])
def test_lines_that_are_done_are_left_out_and_ids_that_occur_twice_are_known(
    job: str | None, tmp_path: Path
) -> None:
    path, done = tmp_path / "in.jsonl", Bits()
    lines = [line(i, "text") for i in range(5)]
    path.write_text("\n".join([*lines, lines[0], lines[3]]) + "\n")
    done.add(0)
    with path.open("rb") as file:
        seen = overview(file)
    blocks = list(LineSource(path, seen, job, done, 4)._blocks())
    assert [len(block) for block in blocks] == [4, 2]
    found = [one for block in blocks for one in block]
    assert len({one.line.number for one in found} | {0}) == 7
    assert [one.wrong is not None for one in found] == [*[False] * 4, *[job is not None] * 2]


def test_lines_before_a_change_of_the_file_are_answered_before_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order blocks come from their workers."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"text {i}\n" for i in range(6)))
    (model := tmp_path / "model").mkdir()
    given = replace(asked(tmp_path, "out"), plain=False)
    with FileJob(given, model, PLAN, overwrite=False) as job:
        path.write_text("".join(f"next {i}\n" for i in range(6)))

        def answered(lines: Any, *_: Any, **more: Any) -> Any:
            worker = object.__new__(LineWorker)
            worker.answer = lambda _, part: Answers(
                [one.number for one in part], [b'{"index": %d}\n' % one.number for one in part], []
            )
            (task,) = lines.get_read_tasks(1)
            tables = [worker(table) for table in task()]
            return SimpleNamespace(iter_rows=lambda: [x.to_pylist()[0] for x in reversed(tables)])

        monkeypatch.setattr("qoff.ray.job.answered", answered)
        monkeypatch.setattr("ray.data.read_datasource", lambda source, **_: source)
        config = ProcessorConfig("model", batch_size=4)
        with pytest.raises(QoffError, match="has changed while it was read"):
            run(job, config, Opening("model", {}), lambda _: None)
        assert job.left == 0


def test_processes_that_keep_the_ledger_or_read_lines_have_no_torch() -> None:
    """Each import of it takes seconds, on the processors on which the worker begins."""
    program = (
        "import sys; import qoff.ray.ledger, qoff.ray.source\n"
        "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_what_ends_workers_is_said_without_rays_words() -> None:
    told = "File x, line 1\nqoff.errors.BudgetError: too little\n\nFailed\nTo retry, configure it"
    with pytest.raises(QoffError, match=r"^the workers cannot go on: too little$"), _in_a_line():
        raise RayError(told)
    with pytest.raises(QoffError, match=r"^the workers cannot go on: gone$"), _in_a_line():
        raise RayError("File x, line 1\ngone")


def test_a_row_without_one_prompt_is_an_error_of_its_own() -> None:
    rows: list[dict[str, Any]] = [{"prompt": one} for one in (7, ["a", "b"], [], "a", [5, 6])]
    reader = RowReader(rows, PARAMS)
    found = [reader.read(Line(number, number, None)) for number in range(len(rows))]
    assert [isinstance(one, Bad) for one in found] == [True, True, True, False, False]


def test_workers_find_the_folders_of_a_plan(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are told as they are seen from here."""
    openings = list[Opening]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qoff.ray.job.cluster", lambda _: nullcontext())
    monkeypatch.setattr("qoff.ray.job.run", lambda *told: openings.append(told[2]))
    (tmp_path / "draft").mkdir()
    (tmp_path / "in.jsonl").write_text(line(0, "text") + "\n")
    command = ["batch", str(checkpoint), "in.jsonl", "-o", "out.jsonl", "--ray", "auto"]
    command += ["--cache-dir", ".", "--spill-folder", ".", "--draft-tokens", "2", "--draft-model"]
    for draft in ("draft", "owner/name"):
        done = CliRunner().invoke(app, [*command, draft])
        assert done.exit_code == 0, done.output
    assert [opening.options["cache_dir"] for opening in openings] == [tmp_path] * 2
    plans = [opening.options["_plain"] for opening in openings]
    assert [plan.spill_folder for plan in plans] == [tmp_path] * 2
    assert [plan.draft_model for plan in plans] == [str(tmp_path / "draft"), "owner/name"]


def test_a_worker_plans_its_part_of_what_options_leave_open(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says what the planner would choose leaves it nothing but the bounds."""
    free = {"device": 48 << 20, "host": 0, "disk": 1 << 30}
    monkeypatch.setattr(default, "usable_memory", lambda *_: free)
    options = {"device": "cpu", "_bind": True}
    asked = replace(PLAN, batch_size=64, context=4096)
    for given, plan in (("_plain", asked), ("plan", PLAN)):
        with open_llm(Opening(str(checkpoint), {**options, given: plan}, part=0.5)) as llm:
            found = llm.plan
        assert (found.context, found.kv) == (plan.context, plan.kv)
        assert (found.device_memory or 0) <= free["device"] // 2
        assert (found.batch_size == plan.batch_size) == (given == "plan")
    assert found.device_memory == free["device"] // 2
    free["device"] = 1 << 30
    monkeypatch.setattr(default, "left_by_limits", lambda: 104 << 20)
    with open_llm(Opening(str(checkpoint), {"device": "cpu"}, part=0.5)) as llm:
        assert llm.plan.device_memory == (28 << 20) * 7 // 8


def shares_of(
    patched: pytest.MonkeyPatch, machine: Mapping[str, float], spare: float = 1.0, **options: Any
) -> Shares:
    patched.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": machine}])
    return shares(ProcessorConfig("m", **options), "auto", spare)


def test_workers_leave_processors_to_those_that_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shares_of(monkeypatch, {"CPU": 4}, num_cpus=2)
    assert (found.workers, found.resources["num_cpus"]) == (1, 2)
    both = {"CPU": 2, "GPU": 1}
    assert shares_of(monkeypatch, both).workers == 1
    assert shares_of(monkeypatch, {"CPU": 3, "GPU": 1}, 2).workers == 1
    with pytest.raises(ArgumentError, match="need 2 processors of Ray; 1 workers with 1 each"):
        shares_of(monkeypatch, both, 2)
    with pytest.raises(ArgumentError, match="leave 0 of 4"):
        shares_of(monkeypatch, {"CPU": 4}, num_cpus=2, concurrency=2)


def test_parts_of_a_gpu_need_a_bound_that_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"CPU": 4, "GPU": 1}
    bound: dict[str, Any] = {"engine_kwargs": {"device_memory": "4GiB"}, "num_gpus": 0.5}
    assert shares_of(monkeypatch, machine, **bound).workers == 2
    none: dict[str, Any] = {"engine_kwargs": {"device_memory": None, "plan": None}, "num_gpus": 0.5}
    with pytest.raises(ArgumentError, match="needs device_memory"):
        shares_of(monkeypatch, machine, **none)


def test_what_was_begun_often_is_begun_with_few() -> None:
    begun = Counter({1: 2, 2: 1, 3: 1, 4: 4})
    assert groups([*range(12)], begun) == [[0, *range(5, 12)], [2, 3], [1], [4]]
    assert groups([*range(20)], Counter(dict.fromkeys(range(20), 1))) == [
        [*range(8)], [*range(8, 16)], [*range(16, 20)],
    ]  # fmt: skip


def test_what_may_end_its_process_has_it_alone() -> None:
    shared, order = _Shared(), list[str]()

    def hold(name: str, alone: bool) -> threading.Thread:
        def run() -> None:
            with shared.held(alone):
                order.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with shared.held(alone=False), shared.held(alone=False):
        suspect = hold("suspect", alone=True)
        suspect.join(0.05)
        joining = hold("joins after it", alone=False)
        joining.join(0.05)
        assert not order
    suspect.join(10)
    joining.join(10)
    assert order == ["suspect", "joins after it"]


def test_a_ledger_ends_a_run_whose_machines_are_at_fault() -> None:
    ledger, key = Ledger(workers=1), ("task", 0)
    assert ledger.open(key).begun == {}
    ledger.begin(key, [0, 1])
    ledger.fault(key, [0, 1], "the disk is broken")
    assert set(ledger.open(key).begun.values()) == {0}
    ledger.keep(key, Answers([0], [b"x"]))
    assert ledger.open(key).kept.numbers == [0]
    for _ in range(5):
        ledger.open(key)
    with pytest.raises(RuntimeError, match="died one after another: the disk is broken"):
        ledger.open(key)
    ledger.close(key)
    assert ledger.open(key).kept.numbers == []
