"""Types, messages, configuration and channels that every process shares. Imports nothing else of pdserve."""
