"""The KV hand-off inside a worker: engine, KV store and channels joined to the tables and transports of kvtransfer."""
