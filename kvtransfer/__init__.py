"""KV hand-off between workers: links, credits and transports."""
