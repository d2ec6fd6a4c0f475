"""Each request once it is over: a line of the log, and a trace for OpenTelemetry."""
