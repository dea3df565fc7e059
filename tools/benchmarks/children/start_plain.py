"""What every trainer starts with: torch, gRPC, a model and an optimizer."""

from tools.benchmarks.children.stages import print_stage


def main() -> None:
    import torch
    from torch.optim import SGD

    print_stage("torch")
    import grpc  # noqa: F401

    print_stage("client")
    model = torch.nn.Linear(16, 16)
    SGD(model.parameters(), lr=1e-3)  # the first one imports a large part of torch
    print_stage("model")


if __name__ == "__main__":
    main()
