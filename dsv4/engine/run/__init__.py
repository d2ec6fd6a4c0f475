"""Running a step: forward call and sampling, CUDA graphs by bucket, compilation and warm-up."""
