"""What `dvc repro` runs."""
