"""Imports all that a trainer imports at once or later; starts no thread.

For processes that fork trainers: what was imported before the fork, no trainer has to import
(``torchft-run --warm-start --warm-start-preload torch,torch._dynamo,torchft_svc.preload``).
"""

from torchft_svc import client, coordination

for _package in (client, coordination):
    for _name in _package.__all__:
        getattr(_package, _name)
