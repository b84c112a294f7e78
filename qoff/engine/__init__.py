"""Throughput: many sequences through a model in large batches, everything overlapped."""

from .llm import LLM
from .request import Result, SamplingParams

__all__ = ["LLM", "Result", "SamplingParams"]
