"""The language model of Step 3.7, which transformers has within the one that sees alone."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationMixin


def register_step() -> None:
    """Have AutoModelForCausalLM know Step 3.5, if the installed transformers has its layers."""
    if "step3p5" not in CONFIG_MAPPING:
        return
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import (
        Step3p7PreTrainedModel,
        Step3p7TextModel,
    )

    class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        config_class = Step3p7TextConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = Step3p7TextModel(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: Any = None,
            attention_mask: Any = None,
            cache: Any = None,
            logits_to_keep: int = 0,
            **options: Any,
        ) -> Any:
            found = self.model(input_ids, attention_mask, cache=cache, **options)
            hidden = found.last_hidden_state[:, -logits_to_keep:]
            return CausalLMOutputWithPast(logits=self.lm_head(hidden), cache=found.cache)

    names = get_checkpoint_conversion_mapping("step3p7")
    own = [one for one in names if not any(x.startswith("^") for x in one.source_patterns)]
    register_checkpoint_conversion_mapping("step3p5", own)
    AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
