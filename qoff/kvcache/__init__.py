"""What the model remembers of the tokens it has read."""

from .base import KVCache
from .packed import PackedCache
from .plain import PlainCache
from .quant import KVQuant

__all__ = ["KVCache", "KVQuant", "PackedCache", "PlainCache"]
