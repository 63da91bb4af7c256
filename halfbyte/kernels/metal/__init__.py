"""Apple GPU kernels in Metal: for each family of `ops` a .metal file with kernels and a .py file with their launches.
Without an Apple GPU they are executed and race-checked on a CPU: tests/metal."""
