"""Attention backends behind one protocol."""
