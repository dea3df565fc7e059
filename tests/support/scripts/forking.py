"""The program of a fork server whose forks sleep until they are killed."""

import sys
import time

from torchft_svc.host.fork_server import serve

if serve(int(sys.argv[1]), int(sys.argv[2])) is not None:
    time.sleep(60.0)
