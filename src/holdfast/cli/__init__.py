"""The command line: parses, calls, prints. One file per command."""

from holdfast.cli import analyze, bench, catalog, demo, export, report, reproduce, run, tune  # noqa: F401 - importing one adds its command
from holdfast.cli.app import app, main

__all__ = ["app", "main"]
