"""Throughput: many sequences through a model in large batches, everything overlapped."""

from .grammar import StructuredOutputs
from .llm import LLM
from .request import Completion, Logprob, SamplingParams

__all__ = ["LLM", "Completion", "Logprob", "SamplingParams", "StructuredOutputs"]
