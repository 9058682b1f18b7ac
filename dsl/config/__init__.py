"""Calls and settings outside of models: schedules, optimizers, data, the train block; overrides."""
