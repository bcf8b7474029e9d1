"""Training: loop, optimiser, checkpoints, devices, what a person sees. Knows the tasks' wing."""
