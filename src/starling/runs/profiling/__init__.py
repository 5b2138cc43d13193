"""`starling profile` and the commands that rest on it: what a job costs on a machine, measured by training."""
