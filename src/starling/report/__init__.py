"""What people read about a run: log lines, live progress, curves."""
