"""Holdfast inside other frameworks' training loops. One module per framework, each an extra of its own."""
