"""Candidates built and measured: for MetaSchedule, and for a GPU that only files can reach.

Nothing is loaded here; `builder`, `runner` and `database` import TVM, the others do not.
"""
