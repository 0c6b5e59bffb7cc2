"""One file, one run."""
