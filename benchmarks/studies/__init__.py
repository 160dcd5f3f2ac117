"""Trainings behind the docs: `scripts/study NAME`."""
