"""Times on the GPU of this machine: the timer, the process that holds it, and choices by time."""
