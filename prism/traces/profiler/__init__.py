"""PyTorch profiler traces: events of a rank to ops, waits and collectives of a job."""
