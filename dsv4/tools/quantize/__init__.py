"""`dsv4 quantize`: a checkpoint in coarser formats. `run.quantize_checkpoint` is the entry."""
