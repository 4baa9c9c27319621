"""What PyTorch does about the same question, where it is installed."""
