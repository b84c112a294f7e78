"""Where every byte lives and how big batches are."""

from .manual import Memory, Plan

__all__ = ["Memory", "Plan"]
