"""`python -m torchft_svc.buddy` is the command `torchft-buddy`."""

from torchft_svc.buddy.cli import main

if __name__ == "__main__":
    main()
