"""Measurements on real trainings; docs/results.md is made from what they write."""
