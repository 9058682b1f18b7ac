"""From program to training run: executor, transports, launcher, data, telemetry."""
