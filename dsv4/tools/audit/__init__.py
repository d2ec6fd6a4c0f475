"""`dsv4 audit`: is a checkpoint what it claims to be? `run.audit_checkpoint` is the entry."""
