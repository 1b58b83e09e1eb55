"""From a scheduled function to CUDA for clusters of sm_90, as passes in TVM's own pipeline."""
