"""A cascade and its derivation as a streaming function of `s_tir`, still sequential.

`streaming.streaming` writes it; what a step of the stream computes (`phases`), which element a
thread takes in when (`cover`) and where elements are loaded from (`streams`) are values before.
"""
