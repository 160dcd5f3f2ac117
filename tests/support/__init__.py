"""Helpers that unit tests and rank tests share: `from support.cases import CASES`."""
