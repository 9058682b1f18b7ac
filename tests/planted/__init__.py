"""Planted mistakes: small wrong changes to compiler and runtime, and the test or proof that must fail with each."""
