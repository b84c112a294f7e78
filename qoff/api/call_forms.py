"""The forms of calls that are marked by special tokens or a heading, by name."""

from __future__ import annotations

from .cohere_calls import COHERE
from .marked_calls import MARKED

FORMS = {**MARKED, **COHERE}


def form_of(template: str) -> str:
    """The form that a chat template has models write, "" for none of these."""
    for name, form in FORMS.items():
        if any(mark in template for mark in form.template):
            return name
    return ""
