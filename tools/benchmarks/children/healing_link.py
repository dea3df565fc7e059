"""A slow link for the healing benchmark: a proxy that limits what passes, as a process.

Prints ``ready``; each line ``URL`` is answered with that under which it is reached over the link.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from torchft_svc.testing.proxy import Proxy, Throttle

# Fewer and larger pieces than in tests: the link should take little of the machine's time.
_PIECE_BYTES = 256 << 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes-per-s", type=float, required=True)
    throttle = Throttle(parser.parse_args().bytes_per_s)
    print("ready", flush=True)
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            proxy = stack.enter_context(Proxy(line.strip(), throttle, _PIECE_BYTES))
            print(proxy.url, flush=True)


if __name__ == "__main__":
    main()
