"""Where every byte lives and how big batches are."""

from .manual import MTP, Memory, Plan

__all__ = ["MTP", "Memory", "Plan"]
