"""This machine: its processes, threads, sockets, addresses, files and log; nothing knows gRPC."""
