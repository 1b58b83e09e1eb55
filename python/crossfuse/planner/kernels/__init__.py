"""The kernels that the schedule rules build, as values: tiles, phases, resources."""
