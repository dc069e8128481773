"""How long updates of each row take with the device to itself: rows that were trained side by side cannot tell.

python paper/translation_speed.py PACKED RESULTS.jsonl ROW.yaml ... [KEY=VALUE ...]

PACKED is the folder of packed data. Of every row so many batches are trained on three times over: the first time
compiles what there is to compile, the fastest of the others counts. Settings win over those of the files.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from collab.recipes import processes
from collab.recipes.fitting_loop import fit
from collab.recipes.packed_text import Packed
from collab.recipes.settings import read_config
from collab.recipes.smoothed_loss import SmoothedLoss
from collab.recipes.token_batches import TokenBatches, prepare
from collab.recipes.translation import Config
from collab.recipes.translation_model import build_model
from collab.records import RunRecord, append_record, provenance

UPDATES = 16
TOKENS = 16384
"""Of an update: enough for the device, not the program that tells it what to do, to be what is waited for."""


def measure(config: Config, packed: Packed, updates: int) -> dict[str, Any]:
    """Seconds of an update of one row, and the memory it takes."""
    batches = TokenBatches(packed, config.batch_tokens, config.seed)
    chosen = batches(0)[:updates]
    model = build_model(config.architecture(), packed.described["vocabulary"], max_length=256, seed=config.seed)
    settings = dataclasses.replace(
        config.fit_settings(), max_steps=3 * len(chosen), log_every=len(chosen), checkpoint_every=None
    )
    with tempfile.TemporaryDirectory() as folder:
        result = fit(
            model, batches.data, settings, Path(folder), collate=batches.collate, batches=lambda epoch: chosen,
            on_device=prepare, loss=SmoothedLoss(config.label_smoothing), progress=False,
        )  # fmt: skip
        lines = (Path(folder) / "losses.jsonl").read_text(encoding="utf-8").splitlines()
    first, second, third = (json.loads(line)["seconds"] for line in lines)
    return {
        "variant": config.variant, "key_dim": config.key_dim, "batch_tokens": config.batch_tokens,
        "seconds_per_update": min(second - first, third - second) / len(chosen), "peak_memory": result.peak_memory,
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Measure the rows that are named, and add a record of all of them."""
    settings = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    names = [argument for argument in arguments if "=" not in argument]
    if len(names) < 3:
        raise SystemExit(__doc__)
    packed, results = Packed.open(names[0]), Path(names[1])
    given: Mapping[str, Any] = {"batch_tokens": TOKENS, **settings}
    configs = [read_config(Config, Path(name), given) for name in names[2:]]
    device = processes.device_named(configs[0].device)
    torch.set_num_threads(configs[0].threads or torch.get_num_threads())
    rows = []
    for config in configs:
        rows.append(measure(config, packed, UPDATES))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    record = RunRecord(
        name="translation-speed", config={"updates": UPDATES, **given}, metrics={"rows": rows},
        provenance=provenance(0, device),
    )  # fmt: skip
    append_record(results, record)


if __name__ == "__main__":
    main(sys.argv[1:])
