"""Ahead-of-time compilation: bucket ladders, the planner, XLA options, compiling."""
