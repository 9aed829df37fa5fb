"""The control protocol between head and ranks, without I/O."""
