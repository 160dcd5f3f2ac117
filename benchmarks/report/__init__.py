"""Pages of docs/appendix and pictures: `scripts/report`."""
