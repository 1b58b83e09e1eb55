"""Checks before a kernel is lowered: schedules that would become wrong kernels are refused."""
