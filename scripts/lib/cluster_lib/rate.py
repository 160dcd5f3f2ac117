"""How fast a host may send and receive, as arguments of a token bucket, and how late its messages come."""

import re
from dataclasses import dataclass

from cluster_lib.system import ClusterError

_UNITS = {"mbit": 10**6, "gbit": 10**9}
_LOWEST, _HIGHEST = 10**6, 100 * 10**9


@dataclass(frozen=True)
class Rate:
    """A rate as given, and in bits per second; None is no limit."""

    text: str
    bits_per_second: int | None

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """Read `1gbit`, `2.5gbit`, `100mbit` or `unlimited`."""
        if text == "unlimited":
            return cls(text, None)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text)
        bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
        if not _LOWEST <= bits <= _HIGHEST:
            raise ClusterError(
                f"--rate {text!r} is not a rate",
                "Allowed: a number with mbit or gbit from 1mbit to 100gbit, such as 2.5gbit, or unlimited.",
            )
        return cls(text, bits)

    @property
    def burst_bytes(self) -> int:
        """What may pass at once: one millisecond of the rate, but ten full frames at least.

        More would let short messages through as if there were no limit. Less would be lost to
        every moment in which the kernel comes late to refill the bucket.
        """
        assert self.bits_per_second is not None
        return max(self.bits_per_second // 8 // 1000, 10 * 1514)

    @property
    def piece_bytes(self) -> int:
        """The largest piece that TCP may hand to the interface at once, to be counted as one.

        A piece that does not fit into the bucket is cut into frames first, one by one, which
        costs so much CPU time that 1 Gbit/s is not reached.
        """
        return min(64 * 1024, self.burst_bytes // 2)

    @property
    def queue_bytes(self) -> int:
        """What may wait at a port: 30 ms of the rate, but 256 KiB at least, like a switch's buffer."""
        assert self.bits_per_second is not None
        return max(self.bits_per_second // 8 * 30 // 1000, 256 * 1024)

    @property
    def tbf(self) -> list[str]:
        """Return the arguments of tc that limit an interface to this rate."""
        return [
            *("tbf", "rate", f"{self.bits_per_second}bit"),
            *("burst", str(self.burst_bytes), "limit", str(self.queue_bytes)),
        ]


@dataclass(frozen=True)
class Latency:
    """A delay of messages, as given and in seconds."""

    text: str
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Latency":
        """Read `20ms`; `0ms` adds nothing."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)ms", text)
        if not match or float(match[1]) > 10_000:
            allowed = "Allowed: milliseconds from 0ms to 10000ms, such as 20ms."
            raise ClusterError(f"--latency {text!r} is no latency", allowed)
        return cls(text, float(match[1]) / 1000)
