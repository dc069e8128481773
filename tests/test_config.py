"""The settings: every bad value refused by name, the way to disk and back, the size of each layer."""

import dataclasses
import json
import math

import pytest

from collab import CollaborativeConfig
from collab.config import MIXING_STARTS, WEIGHTS
from collab.table import format_table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_dim": 0}, "shared_dim must be at least 1, got 0"),
        ({"shared_dim": -4}, "shared_dim must be at least 1, got -4"),
        ({"shared_dim": 0.0}, r"shared_dim must be an integer, or a fraction in \(0, 1\] .*, got 0.0"),
        ({"shared_dim": 1.5}, r"fraction in \(0, 1\] of each layer's heads x head size, got 1.5"),
        ({"shared_dim": 64.0}, r"fraction in \(0, 1\] of each layer's heads x head size, got 64.0"),
        ({"shared_dim": -0.5}, r"fraction in \(0, 1\].*, got -0.5"),
        ({"shared_dim": math.nan}, r"fraction in \(0, 1\].*, got nan"),
        ({"shared_dim": math.inf}, r"fraction in \(0, 1\].*, got inf"),
        ({"shared_dim": True}, "shared_dim must be an integer >= 1, a fraction.*or a mapping.*, got True"),
        ({"shared_dim": None}, "shared_dim must be an integer >= 1, a fraction.*or a mapping.*, got None"),
        ({"shared_dim": "64"}, "shared_dim must be an integer >= 1, a fraction.*or a mapping.*, got '64'"),
        ({"shared_dim": [64]}, r"shared_dim must be an integer >= 1, a fraction.*or a mapping.*, got \[64\]"),
        ({"shared_dim": {}}, "shared_dim must name at least one layer when it is a mapping, got an empty one"),
        ({"shared_dim": {"a": 0}}, "must map layer paths to integers >= 1, got 'a': 0"),
        ({"shared_dim": {"a": 0.5}}, "must map layer paths to integers >= 1, got 'a': 0.5"),
        ({"shared_dim": {"a": True}}, "must map layer paths to integers >= 1, got 'a': True"),
        ({"shared_dim": {3: 4}}, "must map layer paths to integers >= 1, got 3: 4"),
        ({"weights": "copy"}, r"weights must be one of \['decompose', 'fresh'\], got 'copy'"),
        ({"weights": None}, r"weights must be one of .*, got None"),
        ({"mixing": "gaussian"}, "mixing must be one of .*'concatenate'.*, got 'gaussian'"),
        ({"scale": 0, "weights": "fresh"}, "scale must be a number > 0, got 0"),
        ({"scale": math.inf, "weights": "fresh"}, "scale must be a number > 0, got inf"),
        ({"scale": True, "weights": "fresh"}, "scale must be a number > 0, got True"),
        ({"scale": 0.5}, "scale must come with weights='fresh'"),
        ({"max_iterations": -1}, "max_iterations must be an integer >= 0, got -1"),
        ({"max_iterations": 2.5}, "max_iterations must be an integer >= 0, got 2.5"),
        ({"max_iterations": True}, "max_iterations must be an integer >= 0, got True"),
        ({"tolerance": -1e-9}, "tolerance must be a number >= 0, got -1e-09"),
        ({"tolerance": math.nan}, "tolerance must be a number >= 0, got nan"),
        ({"tolerance": math.inf}, "tolerance must be a number >= 0, got inf"),
        ({"tolerance": "small"}, "tolerance must be a number >= 0, got 'small'"),
        ({"seed": 0.5}, "seed must be an integer from 0 to .*, got 0.5"),
        ({"seed": -1}, "seed must be an integer from 0 to .*, got -1"),
        ({"seed": 2**64}, "seed must be an integer from 0 to .*, got 18446744073709551616"),
    ],
)
def test_bad_values_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        CollaborativeConfig(**({"shared_dim": 8} | options))


@pytest.mark.parametrize("shared_dim", [1, 64, 0.5, 1.0, {"encoder.0.attention": 3, "encoder.1.attention": 5}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "fresh", "mixing": "uniform", "scale": 0.5, "max_iterations": 0, "tolerance": 0, "seed": 2**63 - 1},
    ],
    ids=["defaults", "all set"],
)
def test_json_round_trip(shared_dim, options):
    config = CollaborativeConfig(shared_dim=shared_dim, **options)
    values = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert CollaborativeConfig.from_dict(values) == config
    assert set(values) == {field.name for field in dataclasses.fields(config)}
    # 1 and 1.0 mean different things and must stay apart.
    assert type(CollaborativeConfig.from_dict(values).shared_dim) is type(shared_dim)


def test_every_named_choice_is_taken():
    for weights in WEIGHTS:
        for mixing in MIXING_STARTS:
            assert CollaborativeConfig(shared_dim=8, weights=weights, mixing=mixing).weights == weights


def test_an_unknown_setting_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown setting rank, dim; known are shared_dim, budget, .*weights, mixing, .*seed"
    ):
        CollaborativeConfig.from_dict({"shared_dim": 8, "rank": 4, "dim": 3})


def test_settings_without_a_size_are_refused():
    with pytest.raises(ValueError, match="settings must have shared_dim, budget or max_error, got seed"):
        CollaborativeConfig.from_dict({"seed": 1})


def test_bad_values_from_disk_are_refused_too():
    with pytest.raises(ValueError, match="shared_dim must be at least 1, got 0"):
        CollaborativeConfig.from_dict({"shared_dim": 0})


def test_a_config_cannot_be_changed_from_outside():
    sizes = {"a": 3}
    config = CollaborativeConfig(shared_dim=sizes)
    sizes["b"] = 4
    assert config.shared_dim == {"a": 3}
    config.to_dict()["shared_dim"]["c"] = 5
    assert config.shared_dim == {"a": 3}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3


@pytest.mark.parametrize(
    ("shared_dim", "full_dim", "expected"),
    [
        (5, 64, 5),
        (64, 64, 64),
        (1.0, 64, 64),
        (0.5, 64, 32),
        (1 / 3, 64, 21),  # 21.33
        (0.34, 64, 22),  # 21.76
        (1e-9, 64, 1),  # never none
        (0.999, 64, 64),
        ({"here": 7}, 64, 7),
        ({"there": 7}, 64, None),
        ({"here": 64}, 64, 64),
    ],
)
def test_the_size_of_a_layer(shared_dim, full_dim, expected):
    size = CollaborativeConfig(shared_dim=shared_dim).shared_dim_for("here", full_dim)
    assert size == expected
    assert type(size) is type(expected)


@pytest.mark.parametrize("shared_dim", [65, {"here": 65}])
def test_a_size_beyond_the_heads_is_refused_and_names_the_largest(shared_dim):
    with pytest.raises(ValueError, match=r"at most heads x head size, which is 64 at 'here' and exact, got 65"):
        CollaborativeConfig(shared_dim=shared_dim).shared_dim_for("here", 64)


def test_a_table_lines_up_and_puts_numbers_to_the_right():
    table = format_table(["path", "size", "error", "ok"], [["a", 12, 0.25, True], ["longer", 34567, 1e-5, False]])
    assert table.splitlines() == [
        "path      size   error     ok",
        "------  ------  ------  -----",
        "a           12  0.2500   True",
        "longer  34,567   1e-05  False",
    ]
    assert format_table(["path", "size"], []).splitlines() == ["path  size", "----  ----"]
