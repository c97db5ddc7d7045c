"""Workers: one engine each, with its model, its KV blocks and its channels."""
