"""Rewrites a cascade by its derivation to a streaming function of `s_tir`, still sequential.

`streaming.streaming` writes it; what a step of the stream computes (`phases`), which element a
thread takes in when (`context`) and where elements are loaded from (`streams`) are settled
as values before.
"""
