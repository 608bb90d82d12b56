"""Speed, measured as ratios: see docs/benchmarks.md."""
