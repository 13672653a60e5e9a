"""What `plan` prints, draws and writes."""
