"""For tests of programs that use this package: faults on demand."""

from torchft_svc.testing.faults import FakeProcessGroupWrapper

__all__ = ["FakeProcessGroupWrapper"]
