"""Times of kernels and baselines, each measured in a process of its own.

Nothing is loaded here: planning jobs and printing tables needs neither TVM nor torch.
"""
