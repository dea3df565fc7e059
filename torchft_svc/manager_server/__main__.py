"""`python -m torchft_svc.manager_server` is the command `torchft-manager`."""

from torchft_svc.manager_server.cli import main

main()
