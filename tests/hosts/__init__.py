"""Training loops that others own, with and without the adapters; `make hosts` runs each case in a process."""
