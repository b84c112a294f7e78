"""What the model remembers of the tokens it has read."""

from .plain import PlainCache

__all__ = ["PlainCache"]
