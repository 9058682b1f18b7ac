"""Transports: how tensors get from rank to rank."""
