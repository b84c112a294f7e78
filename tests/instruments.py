"""Hooks of tests."""

from qoff.memory.instrumentation import Instrumentation

POISON = Instrumentation(poison=True)
