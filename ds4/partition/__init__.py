"""How the work and the bytes of a model are divided among ranks. Pure: no device, no transport."""
