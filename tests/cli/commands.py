"""Running the commands in this process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from qoff.cli.main import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object) -> str:
    """The one line that a failing command prints."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("qoff: ")
    return line
