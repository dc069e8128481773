"""Has a trained model translate a few sentences by `collab translate`, for the README to show.

python paper/translation_example.py RUN RESULTS.jsonl

RUN is the folder of a training run: its record says what model it is.
"""

import json
import subprocess
import sys
from pathlib import Path

from collab.recipes import RECORD_NAME, read_record
from collab.records import RunRecord, append_record, provenance

SENTENCES = (
    "A man is riding a bicycle through the park.",
    "Two dogs are playing with a ball in the snow.",
    "I would like to thank you for your report.",
)
PROGRAM = "from collab.cli import main; main()"


def main(run: Path, results: Path) -> None:
    """Translate, and add a record."""
    trained = read_record(run)
    if trained is None:
        raise SystemExit(f"{run} must be a run that is done: it has no {RECORD_NAME}")
    asked = [part for sentence in SENTENCES for part in ("--text", sentence)]
    command = [sys.executable, "-c", PROGRAM, "translate", str(run / "model"), *asked, "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    config = {
        "model": f"runs/translation/{run.name}/model", "sentences": list(SENTENCES),
        "variant": trained["config"]["variant"], "key_dim": trained["config"]["key_dim"],
        "updates": trained["metrics"]["updates"],
    }  # fmt: skip
    record = RunRecord(
        name="translate", config=config, metrics={"translations": told["translations"]}, provenance=provenance(0)
    )
    append_record(results, record)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
