"""Explicit expert placements as JSON files.

Format, version 1::

    {
      "format": "ds4-placement", "version": 1,
      "n_experts": 16,
      "layers": {"0": [[0, 8], [1, 9], ..., [7, 15]], "5": "contiguous"}
    }

`layers` maps a layer number to eight lists of expert ids, one list per shard, or to the word
`"contiguous"`. A layer that is not named is contiguous. Ids within a list may stand in any order;
the arithmetic always adds them in ascending order. Anything else in the file is an error, so that a
misspelt key cannot silently mean the default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError
from ds4.partition.placement import LayerPlacement, Placement, hash_layer_load

__all__ = ["dump_placement", "load_placement", "parse_placement", "placement_for"]

_FORMAT = "ds4-placement"
_VERSION = 1
_MAX_BYTES = 16 << 20  # 1,000 layers of 1,000 experts stay under half of it
_KEYS = ("format", "version", "n_experts", "layers")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in pairs:
        if key in out:
            raise ConfigError(f"key {key!r} is given twice")
        out[key] = value
    return out


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _layer(value: object, n_experts: int) -> LayerPlacement:
    if value == "contiguous":
        return LayerPlacement.contiguous(n_experts)
    if not isinstance(value, list):
        raise ConfigError(f'must be "contiguous" or eight lists of expert ids, got {value!r:.60}')
    lists: list[tuple[int, ...]] = []
    for v, experts in enumerate(value):
        if not isinstance(experts, list) or not all(map(_is_int, experts)):
            raise ConfigError(
                f"entry {v} must be a list of whole expert numbers, got {experts!r:.60}"
            )
        lists.append(tuple(sorted(experts)))
    placement = LayerPlacement(shards=tuple(lists))
    if placement.n_experts != n_experts:
        raise ConfigError(f"places {placement.n_experts} experts, the model has {n_experts}")
    return placement


def parse_placement(
    text: str | bytes, *, n_layers: int, n_experts: int, source: str = "placement"
) -> Placement:
    """Read a placement for a model of `n_layers` layers with `n_experts` experts each.

    Raises:
      ConfigError: not JSON, another format or version, another model size, an unknown key, a layer
        that does not exist, or lists that are no placement. The text begins with `source`.
    """
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a JSON object, got {type(data).__name__}")
    for key in data:
        if key not in _KEYS:
            raise ConfigError(f"{source}: unknown key {key!r}; known are {', '.join(_KEYS)}")
    for key, expected in (("format", _FORMAT), ("version", _VERSION), ("n_experts", n_experts)):
        found = data.get(key)
        if type(found) is not type(expected) or found != expected:
            raise ConfigError(f"{source}: {key} must be {expected!r}, got {found!r:.60}")
    named = data.get("layers")
    if not isinstance(named, dict):
        raise ConfigError(f"{source}: layers must be an object, got {type(named).__name__}")
    layers = [LayerPlacement.contiguous(n_experts)] * n_layers
    for name, value in named.items():
        if not (name.isascii() and name.isdecimal() and str(int(name[:9])) == name) or (
            int(name) >= n_layers
        ):
            raise ConfigError(
                f"{source}: layers: {name!r:.60} is no layer number from 0 to {n_layers - 1}"
            )
        try:
            layers[int(name)] = _layer(value, n_experts)
        except ConfigError as error:
            raise ConfigError(f"{source}: layer {name}: {error}") from None
    return Placement(layers=tuple(layers))


def load_placement(path: Path, *, n_layers: int, n_experts: int) -> Placement:
    """Read a placement file. Raises ConfigError as `parse_placement`, or when it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the placement: {error.strerror}") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_BYTES} bytes, so no placement")
    return parse_placement(text, n_layers=n_layers, n_experts=n_experts, source=str(path))


def placement_for(
    option: str,
    *,
    n_layers: int,
    n_experts: int,
    hash_tables: Mapping[int, NDArray[np.integer]],
) -> Placement:
    """Placement that `--ep-placement` asks for.

    Args:
      option: `contiguous`, `balanced`, or the path of a placement file. Balanced applies to hash
        layers, whose load follows from their table; scored layers have no load before one is
        measured, so they stay contiguous.
      n_layers: layers of the model.
      n_experts: routed experts per layer.
      hash_tables: layer to its token-to-expert table, int[V, K].

    Raises:
      ConfigError: the file or a table is wrong.
    """
    if option == "contiguous":
        return Placement.contiguous(n_layers, n_experts)
    if option == "balanced":
        loads = {layer: hash_layer_load(t, n_experts) for layer, t in hash_tables.items()}
        return Placement.balanced(n_layers, n_experts, loads)
    return load_placement(Path(option), n_layers=n_layers, n_experts=n_experts)


def dump_placement(placement: Placement) -> str:
    """Write a placement in the file format; layers that are contiguous are left out."""
    return json.dumps(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "n_experts": placement.n_experts,
            "layers": {
                str(i): [list(experts) for experts in layer.shards]
                for i, layer in enumerate(placement.layers)
                if not layer.is_contiguous
            },
        }
    )
