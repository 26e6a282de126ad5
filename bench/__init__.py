"""Benchmarks. Each writes its figures as records to bench/results/<card>/<suite>.json."""
