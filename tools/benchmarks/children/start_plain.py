"""What every trainer starts with: torch, gRPC, a model and an optimizer."""

from tools.benchmarks.children.stages import tell_stage


def main() -> None:
    import torch
    from torch.optim import SGD

    tell_stage("torch")
    import grpc  # noqa: F401

    tell_stage("client")
    model = torch.nn.Linear(16, 16)
    SGD(model.parameters(), lr=1e-3)  # the first one imports a large part of torch
    tell_stage("model")


if __name__ == "__main__":
    main()
