"""Transports: how tensors are sent between ranks."""
