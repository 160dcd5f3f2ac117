"""The documentation site: pages, links and the API reference. `scripts/docs` builds it."""
