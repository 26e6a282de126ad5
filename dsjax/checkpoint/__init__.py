"""Checkpoints: the safetensors reader and writer, tables from checkpoint names to model weights, loading."""
