"""Speed and memory of the engine, as ratios in one run: `python -m benchmarks`."""
