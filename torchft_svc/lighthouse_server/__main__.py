"""`python -m torchft_svc.lighthouse_server` is the command `lighthouse`."""

from torchft_svc.lighthouse_server.cli import main

main()
