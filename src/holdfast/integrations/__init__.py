"""Holdfast inside other frameworks' training loops. One file per framework, each an extra of its own."""
