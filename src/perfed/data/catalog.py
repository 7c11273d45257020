"""The data sets, partition schemes and scenarios there are, and which of them a configuration asks for.

A data set is a file in `sources`, a scheme one in `schemes`, a scenario one in `scenarios`. They are read as text, so
that wrong settings are refused before numpy and torch are imported.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from perfed.core.errors import Problem, nearest, refuse_file
from perfed.data.config import DataConfig
from perfed.discover import constants, members, parse

SOURCES = Path(__file__).parent / "sources"
SCHEMES = Path(__file__).parent / "schemes"
SCENARIOS = Path(__file__).parent / "scenarios"


def datasets() -> dict[str, str]:
    """Name and describe the data sets."""
    return members(SOURCES, "load")


def partitions() -> dict[str, str]:
    """Name and describe the partition schemes."""
    return members(SCHEMES, "share", "rows")


def scenarios() -> dict[str, str]:
    """Name and describe the scenarios."""
    return members(SCENARIOS, "SETTINGS")


def with_scenario(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of the section `data` with those of the scenario that they name; they go before its."""
    name = settings.get("scenario")
    if not name or not isinstance(name, str):
        return settings
    refuse_file(name, "data.scenario")
    if name.replace("_", "-") not in scenarios():
        raise Problem(f"data.scenario: there is no scenario '{name}'{nearest(name, scenarios())}")
    return constants(parse(SCENARIOS / f"{name.replace('-', '_')}.py").body)["SETTINGS"] | settings


def scheme(config: DataConfig) -> str:
    """Return the name of the partition that `config` asks for, or of the usual one of its data set.

    A data set's file may declare ONLY_PARTITION, where its clients are what it is about, or a USUAL_PARTITION.
    """
    chosen, declared = config.partition, _declared(config)
    refuse_file(chosen, "data.partition")
    if chosen and chosen not in partitions():
        raise Problem(f"data.partition: there is no partition '{chosen}'{nearest(chosen, partitions())}")
    only = declared.get("ONLY_PARTITION", "")
    if only and chosen not in ("", only):
        raise Problem(
            f"data set '{config.name}' has clients of its own: leave out data.partition '{chosen}'"
            + f", or say '{only}' in place of the scenario's" * bool(config.scenario)
        )
    return only or chosen or declared.get("USUAL_PARTITION", "dirichlet")


def usual_normalise(config: DataConfig) -> str:
    """Return how the tables of a data set are normalised where nobody says: as its file declares, else not at all."""
    return _declared(config).get("USUAL_NORMALISE", "none")


def _declared(config: DataConfig) -> dict[str, str]:
    """Return the constants of a data set's file."""
    return _constants(config.name.replace("-", "_"))


@cache
def _constants(stem: str) -> dict[str, str]:
    return constants(parse(SOURCES / f"{stem}.py").body)


def public_folder(config: DataConfig) -> Path | None:
    """Return the folder that public samples are read from; None: there is none.

    A name without a slash is that of a data set first, whatever lies in the working directory.
    """
    name = config.public_data
    if "/" not in name and (name.replace("_", "-") in datasets() or not name or not Path(name).expanduser().exists()):
        return None
    return Path(name).expanduser().resolve()


def check(config: DataConfig) -> None:
    """Refuse what can be refused without reading a data file."""
    refuse_file(config.name, "data.name")
    if config.name not in datasets():
        raise Problem(f"data.name: there is no data set '{config.name}'{nearest(config.name, datasets())}")
    if config.split == "client" and config.test + config.val >= 1:
        raise Problem(
            f"data.test + data.val must be below 1 to leave training samples, not {config.test:g} + {config.val:g}"
        )
    name = scheme(config)
    if config.split == "official" and name == "natural":
        raise Problem("data.split 'official' does not go with natural clients, whose samples may all lie in one part")
    if config.share_low > config.share_high:
        raise Problem(f"data.share_low {config.share_low:g} must not be above data.share_high {config.share_high:g}")
    config.angles()
    for setting in ("labels", "channels"):
        if config.name != "folder" and getattr(config, setting) not in ("", "auto"):
            raise Problem(f"data.{setting} is for files of your own (data set 'folder'), not for '{config.name}'")
    config.renames()
    if config.name == "folder" and config.dir is None:
        raise Problem("data set 'folder' needs --data-dir: the folder with one file per client, or one table")
    if config.dir is not None and not Path(config.dir).expanduser().exists():
        raise Problem(f"data.dir: there is no folder '{config.dir}'")
