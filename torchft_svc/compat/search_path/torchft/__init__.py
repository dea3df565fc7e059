"""Stands for the public torchft release in processes that have this folder on their path."""

import sys

if __name__ == "torchft":
    import torchft_svc.compat
    from torchft_svc.compat.finder import install

    install(replace=True)  # whoever has set the path has decided that
    sys.modules[__name__] = torchft_svc.compat
