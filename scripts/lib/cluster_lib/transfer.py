"""One end of a TCP transfer, for measuring what rate the network reaches.

transfer.py receive PORT             prints `ready`, then bytes and seconds from first to last byte
transfer.py send ADDRESS PORT BYTES
"""

import socket
import sys
import time

_PIECE = 1 << 18


def receive(port: int) -> None:
    """Take one transfer and print its bytes and seconds."""
    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            buffer = bytearray(_PIECE)
            # The first piece starts the clock, so it does not count.
            connection.recv_into(buffer)
            started = time.perf_counter()
            total = 0
            while count := connection.recv_into(buffer):
                total += count
            print(total, time.perf_counter() - started, flush=True)


def send(address: str, port: int, num_bytes: int) -> None:
    """Send that many bytes."""
    piece = memoryview(bytes(_PIECE))
    with socket.create_connection((address, port), timeout=30) as connection:
        connection.settimeout(None)
        while num_bytes > 0:
            num_bytes -= connection.send(piece[: min(num_bytes, _PIECE)])


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
