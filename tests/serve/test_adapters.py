"""Adapters as models of the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from qoff.engine import SamplingParams
from tests.adapters import save_adapter

from .conftest import running


def test_a_request_names_an_adapter_as_its_model(checkpoint: Path, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    save_adapter(checkpoint, tmp_path / "a", lora_alpha=16)
    with running(checkpoint, adapters={"sql": tmp_path / "a"}, device="cpu") as served:
        client = served.client()
        assert [one.id for one in client.models.list().data] == ["tiny", "sql"]
        assert client.models.retrieve("sql").model_dump()["parent"] == "tiny"
        texts = {}
        for model in ("tiny", "sql"):
            answer = client.completions.create(
                model=model, prompt="abc", max_tokens=12, temperature=0
            )
            assert answer.model == model
            texts[model] = answer.choices[0].text
        stream = client.completions.create(
            model="sql", prompt="abc", max_tokens=12, temperature=0, stream=True
        )
        assert "".join(one.choices[0].text for one in stream) == texts["sql"] != texts["tiny"]
        assert served.engine.llm is not None
        params = SamplingParams(temperature=0, max_tokens=12)
        (own,) = served.engine.llm.generate("abc", params, adapter="sql")
        assert own.text == texts["sql"]
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny', 'sql'"):
            client.completions.create(model="other", prompt="abc")
