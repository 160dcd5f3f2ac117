"""What `measure` and `status` print: lines for people, JSON for programs."""

import dataclasses
import json
from typing import Any

from cluster_lib.errors import ClusterError
from cluster_lib.measure import Measurement
from cluster_lib.network import counters, processes
from cluster_lib.record import Cluster, load_complete


def show_measurements(cluster: Cluster, results: list[Measurement], as_json: bool) -> None:
    """Print asked against reached."""
    asked = cluster.rate.bits_per_second
    if as_json:
        facts = [{"asked_bits_per_second": asked, **dataclasses.asdict(result)} for result in results]
        print(json.dumps(facts, indent=2))
        return
    for result in results:
        reached = result.slowest_bits_per_second
        share = f" ({100 * reached / asked:.1f} %)" if asked else ""
        print(
            f"{result.pattern}: {result.transfers} x {result.bytes_each / 10**6:.0f} MB,"
            f" {reached / 10**6:,.1f} Mbit/s of {cluster.rate.text}{share}, {result.dropped_packets} dropped"
        )


def state(cluster: Cluster) -> dict[str, Any]:
    """What is known about a cluster, with the counters of its hosts; of an incomplete one there are none."""
    try:
        hosts = [counter.as_dict() for counter in counters(load_complete(cluster.name))]
    except ClusterError:
        hosts = []
    return {
        "name": cluster.name,
        "complete": bool(hosts),
        "rate": cluster.rate.text,
        "bits_per_second": cluster.rate.bits_per_second,
        "num_processes": len(processes(cluster)),
        "hosts": hosts,
    }


def show_states(states: list[dict[str, Any]], as_json: bool) -> None:
    """Print what is up."""
    if as_json:
        print(json.dumps(states, indent=2))
        return
    if not states:
        print("no cluster is up")
    for cluster in states:
        if not cluster["complete"]:
            print(f"cluster {cluster['name']}: incomplete; scripts/cluster down --name {cluster['name']}")
            continue
        hosts = cluster["hosts"]
        words = f"{len(hosts)} hosts at {cluster['rate']}, {cluster['num_processes']} processes"
        print(f"cluster {cluster['name']}: {words}")
        for host in hosts:
            counted = (
                f"{host['tx_bytes']:,} bytes sent, {host['rx_bytes']:,} received, {host['dropped']} dropped"
            )
            print(f"  {host['host']} {host['address']}: {counted}")
