"""Needle tests: prompts from a seed, the same scores by every way to them, tables that add up."""

from __future__ import annotations

import json
import random
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.errors import ArgumentError, QoffError
from qoff.eval.needle.prompts import NeedlePrompt, NeedleSettings, endless, prompts
from qoff.eval.needle.result import CacheSetting, NeedleResult, Trial, is_retrieved
from qoff.eval.needle.run import NeedleResources, run
from qoff.eval.texts import read_text
from qoff.hf.tokenizer import load_tokenizer
from qoff.kvcache import KVPlacement, KVQuant
from qoff.models.convert.convert import convert
from tests.tiny_models import QUANT, reference_model, save_model, save_tokenizer

POSITIONS = 1024
# A letter is a token here, so that the frame alone has about 250.
FILLER = "One two three. Four five six seven! Is eight nine ten? Eleven twelve. Thirteen is next."
SETTINGS = NeedleSettings(
    lengths=(420, 640), depths=(0.0, 0.5, 1.0), repetitions=2, answer_tokens=8, filler=FILLER
)
WINDOW = 16
PACKED = CacheSetting(KVQuant(window=WINDOW))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("needle")
    save_model(base / "model", "llama-head64", max_position_embeddings=POSITIONS)
    save_tokenizer(base / "model")
    convert(base / "model", base / "checkpoint", quant=QUANT, for_cpu=True)
    return base / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def float32(checkpoint: Path) -> NeedleResult:
    return run(checkpoint, SETTINGS, {"float32": CacheSetting(None)})


def scores(result: NeedleResult) -> torch.Tensor:
    return torch.tensor([trial.log_probability for trial in result.trials])


def asked(tokenizer: Any, settings: NeedleSettings = SETTINGS) -> list[NeedlePrompt]:
    return list(prompts(tokenizer, settings))


def test_prompts_are_those_of_the_seed(tokenizer: Any) -> None:
    first = asked(tokenizer)
    assert asked(tokenizer) == first
    other = asked(tokenizer, replace(SETTINGS, seed=1))
    assert not {p.key for p in first} & {p.key for p in other}


def test_a_prompt_has_the_key_once_where_it_was_wanted(tokenizer: Any) -> None:
    settings = replace(SETTINGS, lengths=(1000,), depths=(0.0, 0.3, 0.7, 1.0))
    found = asked(tokenizer, settings)
    assert len(found) == 8
    for repetition in (0, 1):
        places = []
        same = [p for p in found if p.repetition == repetition]
        assert len({p.key for p in same}) == 1
        for prompt in same:
            text = tokenizer.decode(prompt.tokens)
            assert text.count(prompt.key) == 1
            assert tokenizer.decode(prompt.key_tokens).strip() == prompt.key
            assert 900 < len(prompt.tokens) <= 1000 - settings.answer_tokens
            body = text[text.index("asked for it.") : text.rindex("What is")]
            places.append(body.index(prompt.key) / len(body))
        wanted = torch.tensor([0.0, 0.3, 0.7, 1.0])
        torch.testing.assert_close(torch.tensor(places), wanted, atol=0.15, rtol=0)


def test_prompts_of_other_depths_differ_in_order_only(tokenizer: Any) -> None:
    first, second, third = (sorted(p.tokens) for p in asked(tokenizer)[:3])
    assert first == second == third


def test_the_tokenizers_template_frames_the_prompt(tokenizer: Any) -> None:
    plain = copy(tokenizer)
    plain.chat_template = None
    (chat, *_), (raw, *_) = asked(tokenizer), asked(plain)
    assert tokenizer.decode(chat.tokens).startswith("<s>user: The following text")
    assert tokenizer.decode(chat.tokens).endswith("<s>assistant: The pass key is")
    assert tokenizer.decode(raw.tokens).startswith("The following text")


def test_the_key_is_hidden_in_qoffs_text_by_default(tokenizer: Any) -> None:
    first, *_ = asked(tokenizer, replace(SETTINGS, filler="", lengths=(1000,), depths=(1.0,)))
    body = tokenizer.decode(first.tokens).split("asked for it.")[1].split("The pass key")[0]
    assert body.replace("<unk>", "").strip()[:60] in " ".join(read_text().split())


def test_sentences_go_round() -> None:
    source = endless(["A b.", "C d!", "E f?"], random.Random(0))
    found = [next(source) for _ in range(7)]
    assert sorted(set(found)) == ["A b.", "C d!", "E f?"]
    assert found[:4] == found[3:]


def test_the_score_is_the_models(checkpoint: Path, tokenizer: Any, float32: NeedleResult) -> None:
    model = reference_model(checkpoint)
    for prompt, trial in zip(asked(tokenizer), float32.trials, strict=True):
        ids = torch.tensor([[*prompt.tokens, *prompt.key_tokens]])
        with torch.inference_mode():
            rows = model(ids).logits[0, len(prompt.tokens) - 1 : -1].log_softmax(-1)
        wanted = float(rows.gather(1, ids[0, len(prompt.tokens) :, None]).sum())
        assert trial.log_probability == pytest.approx(wanted, abs=2e-3)
        assert (trial.length, trial.depth) == (prompt.length, prompt.depth)
        assert trial.prompt_tokens == len(prompt.tokens)


def test_states_that_cannot_go_back_are_read_again(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen3.5", max_position_embeddings=POSITIONS)
    save_tokenizer(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "made", quant=QUANT, for_cpu=True)
    settings = replace(SETTINGS, lengths=(420,), depths=(0.5,), repetitions=1)
    (trial,) = run(tmp_path / "made", settings, {"float32": CacheSetting(None)}).trials
    (prompt,) = asked(load_tokenizer(tmp_path / "made"), settings)
    ids = torch.tensor([[*prompt.tokens, *prompt.key_tokens]])
    with torch.inference_mode():
        rows = reference_model(tmp_path / "made")(ids).logits[0, len(prompt.tokens) - 1 : -1]
    wanted = rows.log_softmax(-1).gather(1, ids[0, len(prompt.tokens) :, None]).sum()
    assert trial.log_probability == pytest.approx(float(wanted), abs=2e-3)


def test_a_packed_cache_with_nothing_packed_scores_the_same(
    checkpoint: Path, float32: NeedleResult
) -> None:
    unpacked = CacheSetting(KVQuant(window=POSITIONS))
    found = run(checkpoint, SETTINGS, {"window": unpacked})
    torch.testing.assert_close(scores(found), scores(float32), atol=1e-3, rtol=0)
    assert [t.answer for t in found.trials] == [t.answer for t in float32.trials]


def test_packing_moves_scores_and_where_blocks_lie_does_not(
    checkpoint: Path, float32: NeedleResult
) -> None:
    caches = {
        "packed": PACKED,
        "disk": CacheSetting(PACKED.kv, KVPlacement(0.5, 0.0)),
        "8 bits": CacheSetting(KVQuant(8, 8, window=WINDOW)),
        "sparse": CacheSetting(KVQuant(window=WINDOW, attention_top=0.25)),
    }
    resources = NeedleResources(prefill_tokens=128)
    found = run(checkpoint, SETTINGS, caches, resources=resources)
    count = len(float32.trials)
    assert [t.cache for t in found.trials] == [name for name in caches for _ in range(count)]
    packed, disk, fine, sparse = scores(found).split(count)
    torch.testing.assert_close(disk, packed, atol=1e-3, rtol=1e-3)
    exact = scores(float32)
    assert (packed - exact).abs().max() > 1e-3
    assert (fine - exact).abs().mean() < (packed - exact).abs().mean()
    assert (sparse - packed).abs().max() > 1e-3


def test_progress_counts_to_the_end(checkpoint: Path) -> None:
    settings = replace(SETTINGS, lengths=(400,), repetitions=1)
    seen: list[tuple[int, int]] = []
    caches = {"packed": PACKED, "float32": CacheSetting(None)}
    run(checkpoint, settings, caches, progress=lambda *both: seen.append(both))
    assert seen == [(i, 6) for i in range(1, 7)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (POSITIONS + 1,)}, "the model has 1024 positions"),
        ({"lengths": (100,)}, "needle and question alone"),
        ({"answer_tokens": 3}, "use more answer_tokens"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    changes: dict[str, Any], message: str, checkpoint: Path
) -> None:
    with pytest.raises(ArgumentError, match=message) as refusal:
        run(checkpoint, replace(SETTINGS, **changes), {"packed": PACKED})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": ()},
        {"depths": (1.5,)},
        {"repetitions": 0},
        {"filler": " "},
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(changes))):
        NeedleSettings(**changes)


def test_a_float32_cache_stays_on_the_device() -> None:
    with pytest.raises(ArgumentError, match="on the device alone"):
        CacheSetting(None, KVPlacement(0.5, 0.5))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" 48213.", True),
        (" 48,213", True),
        ("the number 48213, not 5", True),
        (" 482130", False),
        (" 4821", False),
        (" 11111 or 48213", False),
        ("", False),
    ],
)
def test_the_first_number_of_an_answer_counts(answer: str, right: bool) -> None:
    assert is_retrieved(answer, "48213") is right


def made(hits: dict[str, list[list[int]]]) -> NeedleResult:
    """A result with so many of two keys retrieved, by cache, [length][depth]."""
    settings = NeedleSettings(lengths=(100, 200), depths=(0.0, 1.0), repetitions=2)
    trials = [
        Trial(cache, length, depth, i, length, "12345", "", i < count, -1.0 - i)
        for cache, table in hits.items()
        for length, row in zip((100, 200), table, strict=True)
        for i in range(2)
        for depth, count in zip((0.0, 1.0), row, strict=True)
    ]
    return NeedleResult("m", settings, {name: CacheSetting() for name in hits}, tuple(trials))


HITS = {"a": [[2, 2], [2, 1]], "b": [[2, 1], [0, 1]], "c": [[0, 1], [2, 2]]}


def test_tables_are_means_over_repetitions() -> None:
    result = made(HITS)
    assert result.retrieved("b") == [[1.0, 0.5], [0.0, 0.5]]
    assert result.log_probabilities("b") == [[-1.5, -1.5], [-1.5, -1.5]]
    assert result.lost_at() == {"a": None, "b": 200, "c": 100}
    text = result.markdown()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["a", "88%", "-1.50", "-"] in rows
    assert ["b", "50%", "-1.50", "200 tokens"] in rows
    assert ["200", "0% (-1.50)", "50% (-1.50)"] in rows
    found = json.loads(json.dumps(result.as_dict()))
    assert found["lost_at"] == {"a": None, "b": 200, "c": 100}
    assert found["caches"]["a"]["kv"]["k_bits"] == 4
    assert len(found["trials"]) == 24


def test_heat_maps_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = made(HITS).plot(tmp_path / "new" / "heat.v1")
    assert [path.name for path in paths] == ["heat.v1.png", "heat.v1.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[1].read_text()


def test_plots_without_matplotlib_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(QoffError, match=r"pip install 'qoff\[eval\]'"):
        made(HITS).plot(tmp_path / "heat")
