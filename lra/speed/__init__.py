"""Speed: times, memory and counted costs of models. Knows the wings of training and tasks."""
