"""The model of the server's tests."""

from tests.serve.conftest import checkpoint

__all__ = ["checkpoint"]
