"""Fuzz targets and the runner that drives them; see `fuzz/README.md`."""
