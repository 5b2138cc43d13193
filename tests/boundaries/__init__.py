"""What must hold wherever a run is interrupted: at losses, joins, checkpoints and resumes, under every strategy."""
