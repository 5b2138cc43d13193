"""Studies: one question, a grid of runs on the virtual engine, and the answer in a table, curves and words."""
