"""What `scripts/doctor` examines: this installation, or a model file."""
