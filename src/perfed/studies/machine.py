"""A place to compute, which a study's results do not depend on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from perfed.training.config import Config


@dataclass(frozen=True)
class Machine:
    """Where and with what to compute; None: as a configuration says."""

    engine: str | None = None
    device: str | None = None
    compile: bool | None = None
    data_dir: str | None = None

    def configure(self, config: Config) -> Config:
        """Return a configuration that computes here."""
        asked = {"engine": self.engine, "device": self.device, "compile": self.compile}
        run = dataclasses.replace(config.run, **{key: value for key, value in asked.items() if value is not None})
        data = config.data if self.data_dir is None else dataclasses.replace(config.data, dir=self.data_dir)
        return dataclasses.replace(config, run=run, data=data)
