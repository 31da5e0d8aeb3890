"""Benchmarks of kvrs beside its peers: ``python -m benches.decode``, ``.endtoend``, ``.prefill``."""
