"""A replica group of ours that starts its manager before it imports torch."""

from torchft_svc import start_manager_early

start_manager_early()

from tools.benchmarks.children.trainer_ours import main  # noqa: E402 - this imports torch

if __name__ == "__main__":
    main()
