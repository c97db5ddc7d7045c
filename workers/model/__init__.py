"""Models: configuration, checkpoints, packed linears, kernels and the decoder."""
