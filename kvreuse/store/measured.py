"""A model's and its devices' profile in one object: kept as JSON, and checked against what it is used for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvreuse.errors import ProfileMismatchError
from kvreuse.store.devices import StorageDevice
from kvreuse.store.profile import DeviceProfile, ModelProfile, from_json, to_json

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvreuse.model import ReuseModel

Device = str | StorageDevice | DeviceProfile
_VERSION = 1


@dataclass(frozen=True, repr=False)
class Measured:
    """What was measured: one model, and devices whose names differ."""

    model: ModelProfile
    devices: tuple[DeviceProfile, ...]

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if len(set(names)) < len(names):
            raise ValueError(f"devices={names}: give every device a name of its own")

    def device(self, device: Device) -> DeviceProfile:
        """A profiled device; raises ProfileMismatchError if there is none of that name and throttle."""
        name = device if isinstance(device, str) else device.name
        found = next((d for d in self.devices if d.name == name), None)
        if found is None:
            known = ", ".join(d.name for d in self.devices) or "none"
            raise ProfileMismatchError(f"device {name!r} is not in the profile ({known}): profile it too")
        if isinstance(device, StorageDevice) and device.throttle_bytes_per_s != found.throttle_bytes_per_s:
            raise ProfileMismatchError(
                f"device {name!r} has throttle_bytes_per_s={device.throttle_bytes_per_s}, it was profiled with "
                f"{found.throttle_bytes_per_s}: profile it again"
            )
        return found

    def check(self, model: ReuseModel, devices: Iterable[Device] = (), fingerprint: str | None = None) -> None:
        """Raise ProfileMismatchError unless the profile is of this model, as it runs now, and has these devices."""
        own = self.model
        pairs = {
            "fingerprint": (own.fingerprint[:12], (fingerprint or model.fingerprint())[:12]),
            "device": (own.device, device_name(model)),
            "dtype": (own.dtype, str(model.dtype).removeprefix("torch.")),
            "threads": (own.threads, torch.get_num_threads()),
        }
        for what, (profiled, now) in pairs.items():
            if profiled != now:
                raise ProfileMismatchError(
                    f"the profile is of {own.model} with {what} {profiled}, {model.name} has {what} {now}: its times "
                    "mean nothing here; run LoadingController.profile again"
                )
        for device in devices:
            self.device(device)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        profiles = {"model": to_json(self.model), "devices": [to_json(d) for d in self.devices]}
        return {"version": _VERSION, **data, **profiles}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """From `to_json`'s values; raises ValueError for anything else."""
        names = {"version", *(f.name for f in fields(cls))}
        if not isinstance(data, dict) or data.get("version") != _VERSION or set(data) != names:
            raise ValueError(f"not a profile of version {_VERSION}; run LoadingController.profile again")
        settings = {name: data[name] for name in names - {"version"}}
        settings["model"] = from_json(ModelProfile, data["model"])
        settings["devices"] = tuple(from_json(DeviceProfile, d) for d in data["devices"])
        return cls(**settings)

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".new")
        aside.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(aside, path)
        return path

    @classmethod
    def load(cls, path: str | Path, model: ReuseModel | None = None) -> Self:
        """Read what `save` wrote; with ``model`` it is checked. Raises ValueError, ProfileMismatchError."""
        try:
            found = cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error
        if model is not None:
            found.check(model)
        return found

    def __repr__(self) -> str:
        """Short, and different for every profile: it is part of results files' keys."""
        digest = hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:8]
        return f"{type(self).__name__}({self.model.model}, {len(self.devices)} devices, profile {digest})"


def device_name(model: ReuseModel) -> str:
    """Where a model computes: a GPU by its name, for another one has other times."""
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)
