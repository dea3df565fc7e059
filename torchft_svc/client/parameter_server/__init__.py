"""A server for tensors whose clients come and go: each has a process group of two with it."""

from torchft_svc.client.parameter_server.server import ParameterServer

__all__ = ["ParameterServer"]
