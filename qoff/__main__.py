"""`python -m qoff` is the `qoff` command."""

from qoff.cli.main import app

if __name__ == "__main__":
    app()
