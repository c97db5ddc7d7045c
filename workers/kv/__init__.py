"""The KV store: the only owner of KV bytes."""
