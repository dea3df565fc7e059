"""Torch's stores, from the module whose type stubs declare them.

They are the objects that ``torch.distributed`` hands on without declaring it.
"""

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore"]
