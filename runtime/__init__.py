"""Program to training: executor, transports, launcher, data, telemetry."""
