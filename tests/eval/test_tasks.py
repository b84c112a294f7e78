"""Tasks on a qoff model give what the harness's own model gives on the dequantized weights."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm

import qoff
from qoff.errors import ArgumentError, QoffError
from qoff.eval import extras
from qoff.eval.tasks.harness import QoffLM
from qoff.eval.tasks.run import OWN_TASKS, evaluate, manager_of, markdown, run_tasks
from qoff.hf.budget import Budget
from tests.module_models import module_checkpoint, module_reference
from tests.tiny_models import load_budgets, reference_model, tiny_checkpoint

COUNTS = {"qoff_knowledge": 40, "qoff_prose": 4, "qoff_words": 12}
OWN = list(COUNTS)
CHOICES = ["a", "b", "ab", " a", "cde"]
PAIRS = [
    *(("Which letter?", f" {choice}") for choice in CHOICES),
    *(("Which letter? ", choice) for choice in CHOICES[:3]),  # the space is moved
    ("", "no context"),
    ("<s>begins with bos", "!"),
    ("long " * 60, "and cut on the left"),  # 300 tokens before, 256 positions
    ("short", "x" * 200),
    ("Which letter?", " a"),  # again
]
TEXTS = ["One.", "A text of more tokens than the model has positions. " * 12, "Two and three."]
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("What follows?", {"until": ["q"], "max_gen_toks": 20}),
    ("And a longer question, what follows that?", {"until": ["q"], "max_gen_toks": 20}),
    ("?", {"until": [], "max_gen_toks": 9, "do_sample": False}),
    ("cut " * 80, {"until": ["\n\n"], "max_gen_toks": 20}),
]


@pytest.fixture(scope="module")
def peer(checkpoint: Path) -> HFLM:
    """The harness's model for transformers, on the dequantized weights."""
    _, tokenizer = qoff.load(checkpoint)
    return HFLM(pretrained=reference_model(checkpoint), tokenizer=tokenizer, batch_size=2)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def instances(kind: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def opened(checkpoint: Path, **options: Any) -> QoffLM:
    return QoffLM(str(checkpoint), **{"kv": None, **options})


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 3, "pass_tokens": 7}, {"batch_size": "20"}]
)
def test_continuations_score_as_the_peers(
    options: dict[str, Any], checkpoint: Path, peer: HFLM
) -> None:
    requests = instances("loglikelihood", PAIRS)
    found = opened(checkpoint, **options).loglikelihood(requests, disable_tqdm=True)
    wanted = peer.loglikelihood(requests, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], rel=3e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert found[0] == found[-1]


def test_the_likeliest_continuation_is_greedy(checkpoint: Path) -> None:
    lm = opened(checkpoint)
    text = "Begin here"
    (answer,) = lm.generate_until(instances("generate_until", [(text, {"max_gen_toks": 5})]))
    other = answer[:-1] + chr((ord(answer[-1]) - 31) % 64 + 33)
    requests = instances("loglikelihood", [(text, answer), (text, other)])
    (_, first), (_, second) = lm.loglikelihood(requests, disable_tqdm=True)
    assert (first, second) == (True, False)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_texts_score_as_the_peers(batch_size: int, checkpoint: Path, peer: HFLM) -> None:
    requests = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    lm = opened(checkpoint, batch_size=batch_size)
    found = lm.loglikelihood_rolling(requests, disable_tqdm=True)
    wanted = peer.loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(wanted, rel=3e-5)


def test_chats_are_the_peers_and_by_parts_where_a_template_reads_only_these(
    checkpoint: Path, peer: HFLM
) -> None:
    said = [{"role": r, "content": x} for r, x in (("system", "Be"), ("user", "Hi"), ("a", "Yes"))]
    lm = opened(checkpoint)
    for template in (
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}:"
        "{% endif %}",
        "{% for m in messages %}{{ raise_exception('none') if m.role == 'system' }}"
        "<{{ m.content }}>{% endfor %}",
    ):
        lm.tokenizer.chat_template = peer.tokenizer.chat_template = template
        for answered in (True, False):
            wanted = peer.apply_chat_template(said, answered)
            assert "<Hi><Yes" in wanted
            assert lm.apply_chat_template(said, answered) == wanted
    lm.tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content if part.type == 'text' %}"
        "<{{ part.text }}>{% endfor %}{% endfor %}"
    )
    assert lm.apply_chat_template(said[1:2]) == "<Hi>"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_the_peers(batch_size: int, checkpoint: Path, peer: HFLM) -> None:
    requests = instances("generate_until", QUESTIONS)
    found = opened(checkpoint, batch_size=batch_size).generate_until(requests, disable_tqdm=True)
    assert found == peer.generate_until(requests, disable_tqdm=True)
    assert all(found)


def test_without_a_bound_questions_are_measured_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, encode = opened(checkpoint), Mock(side_effect=len)
    monkeypatch.setattr(lm, "tok_encode", lambda text: "x" * encode(text))
    lm.generate_until(instances("generate_until", QUESTIONS), disable_tqdm=True)
    assert encode.call_count == len(QUESTIONS)


def test_more_sequences_share_a_decode_step_where_weights_stream(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    least, _ = load_budgets(checkpoint, batch_size=8)
    lm = opened(checkpoint, batch_size=8, device_memory=least)
    lm.batch_size_per_gpu = 1
    requests = instances("generate_until", [(f"{i}?", {"max_gen_toks": 6}) for i in range(12)])

    def answered() -> tuple[list[str], int]:
        before = lm.model.runtime.store.stats.bytes_read
        found = lm.generate_until(requests, disable_tqdm=True)
        return found, lm.model.runtime.store.stats.bytes_read - before

    together, few = answered()
    assert lm.batch_size == 1
    monkeypatch.setattr(lm, "_answered_at_once", lambda requests: 1)
    apart, many = answered()
    assert together == apart
    assert 0 < 3 * few <= many
    resident = opened(checkpoint, batch_size=2)
    assert resident._answered_at_once(requests) == 2  # nothing is read again


def test_models_of_transformers_modules_score_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    lm = opened(module_checkpoint(base, "stablelm"), batch_size=4, pass_tokens=16)
    other = HFLM(pretrained=module_reference(base, "stablelm"), tokenizer=lm.tokenizer)
    requests = instances("loglikelihood", PAIRS)
    found = lm.loglikelihood(requests, disable_tqdm=True)
    wanted = other.loglikelihood(requests, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], rel=3e-5)


def test_streamed_weights_give_the_same_bits(checkpoint: Path) -> None:
    requests = instances("loglikelihood", PAIRS)
    least, _ = load_budgets(checkpoint, batch_size=8)
    resident, streamed = (
        opened(checkpoint, device_memory=memory).loglikelihood(requests, disable_tqdm=True)
        for memory in (None, least)
    )
    assert resident == streamed


def test_batches_share_each_reading_of_the_weights(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    least, _ = load_budgets(checkpoint, batch_size=8)
    lm = opened(checkpoint, batch_size=8, pass_tokens=2, device_memory=least)
    requests = [(None, [5 + i, 6, 7], [8, 9]) for i in range(6)]

    def scored() -> tuple[list[tuple[float, bool]], int]:
        before = lm.model.runtime.store.stats.bytes_read
        found = lm._loglikelihood_tokens(requests, True, override_bs=1)
        return found, lm.model.runtime.store.stats.bytes_read - before

    together, few = scored()
    room = Budget.scored_at_once
    monkeypatch.setattr(Budget, "scored_at_once", lambda *a: replace(room(*a), batches=1))
    apart, many = scored()
    assert together == apart == opened(checkpoint)._loglikelihood_tokens(requests, True)
    assert 0 < 3 * few <= many
    budget = opened(checkpoint, batch_size=8, device_memory="64MiB").model.budget
    assert budget is not None
    assert room(budget, 1, 5, 512, 2).batches == 1  # resident weights are not read again
    fewer = opened(checkpoint, batch_size=8, device_memory=least - 1)
    assert fewer.batch_size == 4


def test_a_packed_cache_is_packed_between_passes(checkpoint: Path) -> None:
    requests = instances("loglikelihood", [("long " * 30, "and far"), ("short", "and near")])

    def score(**options: Any) -> tuple[float, float]:
        lm = opened(checkpoint, **options)
        (far, _), (near, _) = lm.loglikelihood(requests, disable_tqdm=True)
        return far, near

    kv = qoff.KVQuant(4, 4, window=0)
    exact, packed = score(kv=None), score(kv=kv, pass_tokens=64)
    assert packed[0] != pytest.approx(exact[0], abs=1e-3)
    assert packed[1] == pytest.approx(exact[1], abs=1e-3)
    assert score(kv=kv) == pytest.approx(exact, abs=1e-3)


@pytest.mark.slow
def test_own_tasks_run_offline_and_score_as_the_peers(checkpoint: Path, peer: HFLM) -> None:
    found = run_tasks(checkpoint, OWN, batch_size=16, kv=None)
    wanted = evaluate(peer, OWN, manager_of(OWN))
    assert found["samples"] == COUNTS
    knowledge = found["results"]["qoff_knowledge"]
    assert knowledge == wanted["results"]["qoff_knowledge"]
    assert set(knowledge) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert found["results"]["qoff_words"] == wanted["results"]["qoff_words"]
    prose = found["results"]["qoff_prose"]
    assert prose == pytest.approx(wanted["results"]["qoff_prose"], rel=1e-3)
    assert json.loads(json.dumps(found))["tasks"] == OWN
    assert f"{knowledge['acc']:.4f}" in markdown(found).splitlines()[2]


def test_own_data_are_found_from_any_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `lm_eval --include_path`, which knows no task of ours but by its file."""
    monkeypatch.chdir(tmp_path)
    manager = TaskManager(include_path=[OWN_TASKS], include_defaults=False)
    loaded = manager.load(OWN)
    assert {name: len(task.test_docs()) for name, task in loaded["tasks"].items()} == COUNTS


def test_a_limit_takes_the_first_documents(checkpoint: Path) -> None:
    found = run_tasks(checkpoint, OWN[:1], limit=5, num_fewshot=2, chat=True)
    assert found["samples"] == {"qoff_knowledge": 5}
    assert found["settings"]["limit"] == 5


def test_tasks_of_another_folder_are_found(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.jsonl").write_text(json.dumps({"q": "abc", "c": ["d", "x"], "a": 0}))
    (tmp_path / "letters.yaml").write_text(
        f"""
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "letters.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{c}}}}"
doc_to_target: a
metric_list: [{{metric: acc}}]
"""
    )
    found = run_tasks(checkpoint, ["letters", OWN[2]], include_path=tmp_path)
    assert found["samples"] == {"letters": 1, "qoff_words": 12}


def test_an_unknown_task_names_the_nearest(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the harness's own tasks, whose 14,000 files take 10 s to load: they are not."""
    (tmp_path / "hellaswag.yaml").write_text("task: hellaswag\ndataset_path: gone\n")
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "manager.py"))
    assert "hellaswag" in manager_of(["hellaswag"]).all_tasks

    def own(include_path: Any, include_defaults: bool = True) -> TaskManager:
        assert not include_defaults
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", own)
    with pytest.raises(ArgumentError, match=r"no task 'hellaswga'.* hellaswag") as refusal:
        run_tasks(checkpoint, ["hellaswga"])
    assert "\n" not in str(refusal.value)


def test_data_that_are_not_there_are_said_in_a_line(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "gone.yaml").write_text(
        "task: gone\ndataset_path: json\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        "dataset_kwargs: {data_files: {test: /nowhere/gone.jsonl}}\n"
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    )
    with pytest.raises(QoffError, match=r"cannot be read .*gone\.jsonl") as refusal:
        run_tasks(checkpoint, ["gone"], include_path=tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("options", [{"limit": 0}, {"num_fewshot": -1}, {"limit": 0.5}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any], checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(options))} is"):
        run_tasks(checkpoint, OWN, **options)


@pytest.mark.parametrize("tasks", [[], [""], [OWN[0], ""]])
def test_no_task_is_refused(
    tasks: list[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", None)  # it would take seconds
    with pytest.raises(ArgumentError, match="a task has no name"):
        run_tasks(checkpoint, tasks)


def test_more_examples_than_a_task_has_documents_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match="fewer documents than the 1000 examples"):
        run_tasks(checkpoint, ["qoff_knowledge"], num_fewshot=1000, limit=1)


def test_without_the_harness_it_is_said_what_to_install(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks")
    with pytest.raises(QoffError, match=r"needs lm_eval, .*pip install 'qoff\[eval\]'"):
        run_tasks(checkpoint, OWN)


def test_the_harness_knows_the_model_by_name(checkpoint: Path) -> None:
    asked = f"pretrained={checkpoint},kv=8,pass_tokens=32"
    lm = get_model("qoff").create_from_arg_string(asked, {"batch_size": 3, "device": "cpu"})
    assert isinstance(lm, QoffLM)
    assert (lm.batch_size, lm.pass_tokens, lm.max_length) == (3, 32, 256)
    assert lm.model.runtime.new_cache(1).forms[0].k_bits == 8


@pytest.mark.parametrize("option", ["batch_size", "pass_tokens"])
def test_bad_numbers_are_refused(option: str, checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match=f"{option} is"):
        opened(checkpoint, **{option: "auto"})


def test_answers_as_long_as_the_context_are_refused(checkpoint: Path) -> None:
    requests = instances("generate_until", [("?", {"max_gen_toks": 256})])
    with pytest.raises(ArgumentError, match="leave no room"):
        opened(checkpoint).generate_until(requests, disable_tqdm=True)


def test_own_questions_are_answerable() -> None:
    lines = (OWN_TASKS / "knowledge.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len({doc["question"] for doc in found}) == 40
    for doc in found:
        assert len(set(doc["choices"])) == 4
        assert 0 <= doc["answer"] < 4


def test_documents_that_come_out_alike_tell_no_error(checkpoint: Path) -> None:
    found = run_tasks(checkpoint, ["qoff_words"], limit=2)
    assert found["results"]["qoff_words"] == {"exact_match": 0.0, "exact_match_stderr": None}
    assert "| 0.0000 |     - |" in markdown(found)


def test_logs_have_neither_bars_nor_what_git_says(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # no repository
    run_tasks(checkpoint, OWN, limit=1)
    assert not re.search(r"\r|\||fatal", capfd.readouterr().err)


def test_logs_have_lines_for_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "_EACH_S", 0.0)
    with extras.lines_for_bars(), tqdm(total=2, desc="outer") as outer:
        for _ in tqdm(range(1)):
            outer.update()
    lines = capsys.readouterr().err.splitlines()
    assert "outer: 1 of 2, 00:00 left" in lines
    assert "reading: 0 of 1, ? left" in lines
    assert all(" of " in line for line in lines)
