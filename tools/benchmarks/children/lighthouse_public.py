"""Runs the public release's lighthouse until standard input ends; prints its address."""

import argparse
import sys

from torchft.coordination import LighthouseServer


def main() -> None:
    """Defaults are those of the release's own command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--join-timeout-ms", type=int, default=60_000)
    parser.add_argument("--heartbeat-timeout-ms", type=int, default=5_000)
    options = parser.parse_args()
    server = LighthouseServer(
        bind=f"{options.host}:0",
        min_replicas=options.min_replicas,
        join_timeout_ms=options.join_timeout_ms,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=options.heartbeat_timeout_ms,
    )
    port = server.address().rsplit(":", 1)[-1]
    print(f"lighthouse listening on {options.host}:{port}", flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
