"""A transformers model that is in memory already, streamed layer by layer: `dispatch`."""

from .dispatch import dispatch

__all__ = ["dispatch"]
