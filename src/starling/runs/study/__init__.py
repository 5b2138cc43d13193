"""Studies: one question, a grid of simulated runs, and the answer in a table and curves."""
