"""Benchmarks: engine throughput, HTTP load and the GPU check."""
