"""Throughput: many sequences through a model in large batches, everything overlapped."""

from .grammar import StructuredOutputs
from .llm import LLM
from .pooling import Embedding, PoolingParams
from .request import Completion, Logprob, SamplingParams

__all__ = [
    "LLM",
    "Completion",
    "Embedding",
    "Logprob",
    "PoolingParams",
    "SamplingParams",
    "StructuredOutputs",
]
