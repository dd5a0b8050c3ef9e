"""What the figures about the loading controller share: the devices, their prices, and the record of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvreuse as kr
from experiments.results import Results


@dataclass(frozen=True)
class Device:
    """A storage device of a figure: this machine's disk, read cold, and braked to ``gbps`` if that is given.

    ``price_per_gb_month``: dollars, the order of a cloud's list prices for the kind of device it stands for.
    """

    name: str
    gbps: float | None = None
    price_per_gb_month: float = 0.0

    def at(self, folder: Path) -> kr.StorageDevice:
        """The device, in a folder."""
        rate = None if self.gbps is None else self.gbps * 1e9 / 8
        price = self.price_per_gb_month
        return kr.StorageDevice(
            folder, "1TiB", name=self.name, price_per_gb_month=price, throttle_bytes_per_s=rate, cold=True
        )

    @property
    def label(self) -> str:
        """For tables; what is throttled says so."""
        return f"{self.name}, throttled" if self.gbps is not None else self.name


MEMORY_PRICE = 3.0
DISK = Device("this disk, cold", None, 0.125)
DEVICES = (
    DISK,
    Device("4 Gbps", 4.0, 0.08),
    Device("1 Gbps", 1.0, 0.045),
    # The paper's 4 Gbps disk takes half as long to load a prompt as its GPU to prefill it; here that is this.
    Device("0.15 Gbps", 0.15, 0.023),
)


def profile_record(controller: kr.LoadingController, number: int | None = None) -> dict[str, Any]:
    """A profile as a record, of one round if its ``number`` is given."""
    return {
        "case_id": "profile" if number is None else f"round-{number}",
        "method": "profile",
        "profile": controller.to_json(),
    }


def profile_of(results: Results) -> kr.LoadingController:
    """The controller of a figure's records."""
    for record in results.records:
        if record["method"] == "profile":
            return kr.LoadingController.from_json(record["profile"])
    raise ValueError("there is no profile in these records: run it again")
