"""The ranks of a tensor-parallel worker."""
