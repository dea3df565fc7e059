"""A folder for `PYTHONPATH`, in which a process finds `torchft`; see `finder.install`."""
