"""What `import qoff` offers, and what it costs."""

from __future__ import annotations

import os
import sys

import pytest

import qoff
from qoff import errors
from qoff.models.convert.convert import convert
from qoff.settings import shorten_openmp_spins
from tests.programs import printed


@pytest.mark.parametrize("name", qoff.__all__)
def test_every_name_is_there_and_listed(name: str) -> None:
    assert getattr(qoff, name) is not None
    assert name in dir(qoff)


def test_all_errors_are_exported() -> None:
    found = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, Exception)]
    assert {x.__name__ for x in found} <= set(qoff.__all__)


@pytest.mark.parametrize("kind", [errors.FormatError, errors.DiskReadError])
def test_a_message_is_one_line(kind: type[errors.QoffError]) -> None:
    assert str(kind("a name\nof a damaged file")) == "a name\\nof a damaged file"


def test_convert_is_the_function() -> None:
    assert qoff.convert is convert


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        qoff.laod  # noqa: B018


def test_importing_and_listing_import_nothing_heavy() -> None:
    program = (
        "import sys, qoff; dir(qoff); qoff.BudgetError, qoff.__version__\n"
        "print(sorted({'torch', 'transformers', 'numba', 'numpy', 'triton'} & set(sys.modules)))"
    )
    assert printed("-c", program).strip() == "[]"


@pytest.mark.parametrize(
    ("given", "loaded", "expected"),
    [
        ({}, False, "1000"),
        ({}, True, None),
        ({"GOMP_SPINCOUNT": "7"}, False, "7"),
        ({"OMP_WAIT_POLICY": "active"}, False, None),
    ],
    ids=["set", "torch is there", "given", "a policy is given"],
)
def test_torchs_idle_threads_sleep_early_unless_the_user_said_otherwise(
    given: dict[str, str], loaded: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever happens to it
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if loaded:
        monkeypatch.setitem(sys.modules, "torch", sys)
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    shorten_openmp_spins()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
