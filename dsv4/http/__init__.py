"""The HTTP server: routes, admission, streaming, lifecycle, metrics and logs."""
