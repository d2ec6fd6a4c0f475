"""`dsv4 serve` as processes: a supervisor, one engine, front ends that share the listening socket."""
