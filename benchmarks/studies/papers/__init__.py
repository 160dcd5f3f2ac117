"""Figures of the papers that one process can make: pictures, and tables of docs/appendix/papers.md."""
