"""Reports about a run: log lines, the live display, curves, events, status and summary."""
