"""The command line: parses, calls, prints. One file per command."""

# Importing a module adds its command. They are in the order in which a newcomer needs them, and help shows them so.
from holdfast.cli import demo, run, catalog, reproduce, report, analyze, tune, export, bench  # noqa: F401, I001
from holdfast.cli.app import app, main

__all__ = ["app", "main"]
