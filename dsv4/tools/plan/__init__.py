"""`dsv4 plan`: memory of a model on given hardware, from arithmetic alone."""
